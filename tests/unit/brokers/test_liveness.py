"""FIFOs by which owners show that they live: old FIFOs of other owners are removed."""

from __future__ import annotations

import errno
import os
import select
import shutil
from pathlib import Path

import pytest

from tidemill.brokers.shared.liveness import Liveness
from tidemill.core.errors import BrokerUnavailable
from tidemill.core.files import private_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "owners"


def test_held_fifos_never_look_old(folder: Path) -> None:
    live = Liveness(str(folder))
    live.hold(1)
    os.utime(live.path(1), (0, 0))
    live.keep()
    assert os.stat(live.path(1)).st_mtime > 0


def test_a_cleared_fifo_is_made_again(folder: Path) -> None:
    live, other = Liveness(str(folder)), Liveness(str(folder))
    live.hold(1)
    (fd,), gone = other.watch([1])
    assert not gone
    shutil.rmtree(folder)
    assert other.names() == []
    assert not other.is_here(1)
    # when
    live.keep()
    # then: who watched is called, looks, and finds that it lives
    assert other.is_here(1)
    assert other.alive(1)
    poll = select.poll()
    poll.register(fd, 0)
    assert poll.poll(0)
    # and its end is seen as ever
    live.let_go(1)
    assert not other.alive(1)


def test_an_owner_can_come_when_the_folder_is_gone(folder: Path) -> None:
    live = Liveness(str(folder))
    shutil.rmtree(folder)
    live.hold(2)
    assert Liveness(str(folder)).alive(2)


def test_a_folder_among_temporary_files_that_is_a_link_is_refused(tmp_path: Path) -> None:
    # given what another user may have put there
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BrokerUnavailable, match="is not a folder of this user"):
        private_folder(str(tmp_path / "link"))
    # and what is ours is used again
    assert private_folder(str(tmp_path / "mine")) == private_folder(str(tmp_path / "mine"))


def test_an_owner_is_not_dead_because_its_fifo_cannot_be_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a process that has no descriptor left, or may not write the FIFO
    live, other = Liveness(str(folder)), Liveness(str(folder))
    live.hold(1)

    for number in (errno.EMFILE, errno.EACCES, errno.ENFILE):

        def refuse(*_: object, code: int = number) -> int:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr("tidemill.core.files.Folder.open_fifo", refuse)
            # then nobody is given up, and nothing is raised
            assert other.alive(1)
            assert other.watch([1]) == ([], False)
    live.let_go(1)
    assert not other.alive(1)
