"""The files of an LMDB store: which are opened, which are refused, and on which descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from lmdb_desk import job

from tidemill.brokers.registry import open_broker
from tidemill.errors import BrokerUnavailable, InvalidOption

CLOSED = "sh", "-c", 'exec "$0" "$@" 0<&- 1>&- 2>&-'


def python(code: str, *args: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*under, sys.executable, "-c", textwrap.dedent(code), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# -- descriptors ---------------------------------------------------------------------------------


def test_a_process_without_standard_descriptors_keeps_its_store(tmp_path: Path) -> None:
    # given a process that is started with 0, 1 and 2 closed
    code = """
        import json, os, sys
        from tidemill.brokers.registry import open_broker
        from tidemill.core.job import Envelope
        from tidemill.core.job import Owner
        broker = open_broker(f"lmdb://{sys.argv[1]}/store")
        broker.put([Envelope(id="a", task="t")])
        broker.attach(Owner(id="o", name="w"))
        places = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)}
        os.write(2, b"a line for standard error" * 1000)
        with open(f"{sys.argv[1]}/seen", "w") as file:
            json.dump(places, file)
        broker.close()
    """
    python(code, str(tmp_path), under=CLOSED)
    # then none of them is a file of the store, and what was written there did no harm
    assert (
        tmp_path / "seen"
    ).read_text() == '{"0": "/dev/null", "1": "/dev/null", "2": "/dev/null"}'
    broker = open_broker(f"lmdb://{tmp_path}/store")
    assert broker.get("a") is not None
    broker.close()


def test_a_child_inherits_no_descriptor_of_the_store(tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys
        from tidemill.core.scoreboard import Scoreboard
        from tidemill.brokers.registry import open_broker
        from tidemill.core.job import Owner
        broker = open_broker(f"lmdb://{sys.argv[1]}/store")
        broker.attach(Owner(id="o", name="w"))
        board = Scoreboard(os.path.join(broker.boards, "b"), 1)
        board.claim("o")
        child = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, stdout=-1, text=True)
        print([line for line in child.stdout.splitlines() if sys.argv[1] in line])
    """
    ended = python(code, str(tmp_path))
    assert ended.stdout == "[]\n", ended.stderr


# -- a truncated data file -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [5000, 8192, 100_000])
def test_the_doctor_says_that_a_data_file_is_truncated(tmp_path: Path, size: int) -> None:
    # given a store whose data file lost its end
    broker = open_broker(f"lmdb://{tmp_path}/store")
    broker.put([job(body=b"x" * 500) for _ in range(500)])
    broker.close()
    os.truncate(tmp_path / "store" / "data.mdb", size)
    # when the doctor opens it: a read behind the end of the file would kill the process
    command = [sys.executable, "-m", "tidemill", "doctor", "--url", f"lmdb://{tmp_path}/store"]
    doctor = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    # then
    assert doctor.returncode == 1
    assert "data.mdb is truncated: it has" in doctor.stdout + doctor.stderr


def test_an_emptied_data_file_does_not_pass_for_a_new_store(tmp_path: Path) -> None:
    broker = open_broker(f"lmdb://{tmp_path}/store")
    broker.put([job()])
    broker.close()
    os.truncate(tmp_path / "store" / "data.mdb", 0)
    with pytest.raises(BrokerUnavailable, match="is empty, though the store was in use"):
        open_broker(f"lmdb://{tmp_path}/store")


# -- strange files -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wake", "owners", "boards"])
def test_a_folder_of_the_store_that_is_a_link_is_refused_and_not_followed(
    tmp_path: Path, name: str
) -> None:
    # given a folder whose name leads somewhere else
    store, target = tmp_path / "store", tmp_path / "target"
    open_broker(f"lmdb://{store}").close()
    target.mkdir()
    (target / "1.fifo").write_text("precious")
    if (store / name).exists():
        for file in (store / name).iterdir():
            file.unlink()
        (store / name).rmdir()
    (store / name).symlink_to(target)
    # then it is named, and nothing in it is touched
    with pytest.raises(BrokerUnavailable, match=rf"{name} is not a folder"):
        open_broker(f"lmdb://{store}").tick()
    assert [file.name for file in target.iterdir()] == ["1.fifo"]


@pytest.mark.parametrize("mode", ["0640", "660x", "07777", "0060", "rw", "0400"])
def test_a_mode_with_which_no_store_works_is_refused(tmp_path: Path, mode: str) -> None:
    with pytest.raises(InvalidOption, match="mode in the url must be 0600, 0660 or 0666"):
        open_broker(f"lmdb://{tmp_path}/store?mode={mode}")


# -- a new store ---------------------------------------------------------------------------------


def test_the_folders_of_a_new_store_are_flushed_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given
    flushed: list[str] = []
    flush = os.fsync

    def note(fd: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))
        flush(fd)

    monkeypatch.setattr(os, "fsync", note)
    # when
    open_broker(f"lmdb://{tmp_path}/new/deep/store").close()
    # then its own folder, and each that was made for it
    for path in ("new/deep/store", "new/deep", "new", ""):
        assert str(tmp_path / path) in flushed
    # and never again
    flushed.clear()
    open_broker(f"lmdb://{tmp_path}/new/deep/store").close()
    assert flushed == []
