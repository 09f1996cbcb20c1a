"""FIFOs by which owners show that they live: old FIFOs of other owners are removed."""

from __future__ import annotations

import errno
import os
import select
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from tidemill.brokers.shared.liveness import Liveness
from tidemill.core.files import private_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "owners"


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
    # and watches the new FIFO, which does not call
    other.unwatch_ended()
    (fd,), gone = other.watch([1])
    poll = select.poll()
    poll.register(fd, 0)
    assert not gone
    assert not poll.poll(0)
    # and its end is seen as ever
    live.let_go(1)
    assert not other.alive(1)


@pytest.mark.parametrize("taken", ["", "link", "file"])
def test_the_processes_of_a_user_share_a_folder_that_no_other_user_can_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    # case M13
    # given what another user may have put there first
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"tidemill-{os.geteuid()}"
    if taken == "link":
        (tmp_path / "elsewhere").mkdir()
        usual.symlink_to(tmp_path / "elsewhere")
    elif taken:
        usual.write_text("")
    # then each process finds the same folder, which is the user's
    found = private_folder()
    assert private_folder() == found
    assert (found == str(usual)) == (not taken)
    facts = os.lstat(found)
    assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o700, os.geteuid())
    # and they stay there when the other user has given the name free
    if taken:
        usual.unlink()
    assert private_folder() == found


def test_two_processes_that_start_at_once_make_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case M13
    # given a name that another user has taken
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usual = tmp_path / f"tidemill-{os.geteuid()}"
    usual.write_text("")
    make, others = os.mkdir, list[str]()

    def make_late(path: str, mode: int) -> None:
        if path != str(usual):
            monkeypatch.setattr(os, "mkdir", make)
            others.append(private_folder())  # another process is faster
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", make_late)
    # then this process takes the folder of the faster one
    assert [private_folder()] == others
    assert len(list(tmp_path.iterdir())) == 2


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
