"""A store on disk that several users of a machine share: root, a service's user, its group."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness import Place, open_place
from servers.base import lacks

from tidemill import Tidemill
from tidemill.brokers.lmdb.engine import environment
from tidemill.brokers.registry import open_broker
from tidemill.cli import main
from tidemill.errors import BrokerUnavailable

SERVICE, OTHER, SHARED = 12345, 12346, 12399
"""A service's user, another one, and a group of both. No machine has such accounts."""

LOOKING = (
    *("doctor", "jobs", "job ID", "explain ID", "queues", "info"),
    *("limit", "limit QUEUE --queue", "schedule list", "schedule next NAME"),
)


def as_user(user: int, *groups: int) -> list[str]:
    """The beginning of a command that runs as a user without any right of root's."""
    more = f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"
    return ["setpriv", f"--reuid={user}", f"--regid={user}", more, *_rights()]


@functools.cache
def _rights() -> tuple[str, ...]:
    """Let a user read the interpreter where it lies in root's home.

    The right to read everything does not help to write a file, which every use of a store does.
    """
    code = (
        "import subprocess, sys, tidemill; subprocess.run([sys.executable, '-c', ''], check=True)"
    )
    for rights in ((), ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")):
        command = ["setpriv", f"--reuid={SERVICE}", "--clear-groups", *rights]
        done = subprocess.run([*command, sys.executable, "-c", code], capture_output=True)
        if not done.returncode:
            break
    else:
        lacks("other users cannot read this checkout")
    return rights


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user can reach."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        lacks("only root can run commands as other users, with setpriv")
    path = Path(tempfile.mkdtemp(prefix="tidemill-users-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def own(path: Path, user: int, group: int, mode: int) -> Path:
    path.mkdir()
    os.chown(path, user, group)
    path.chmod(mode)
    return path


def python(under: list[str], code: str, *args: object) -> str:
    """Run code as somebody; what it prints."""
    prelude = (
        "import sys\nfrom tidemill import Tidemill\n"
        "from tidemill.brokers.contract.exchange import *\n"
        "from tidemill.brokers.contract.inspection import *\n"
        "from tidemill.brokers.registry import open_broker\n"
    )
    command = [*under, sys.executable, "-c", prelude + textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tidemill(under: list[str], *args: object) -> subprocess.CompletedProcess[str]:
    command = [*under, sys.executable, "-m", "tidemill", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def files(store: Path) -> dict[str, os.stat_result]:
    return {str(p.relative_to(store)): p.lstat() for p in sorted(store.rglob("*"))}


@pytest.fixture
def place(folder: Path) -> Iterator[Place]:
    own(folder / "store", SERVICE, SERVICE, 0o700)
    with open_place(folder) as place:
        place.write("@mill.task\ndef double(n):\n    return 2 * n", load=False)
        yield place


def test_acts_of_root_stop_no_worker_of_the_service_user(place: Place) -> None:
    # given a worker of the service's user, on a store in its own folder
    store, task = place.path / "store", place.task("double")
    worker = place.worker(under=as_user(SERVICE)).wait_ready()
    # when root looks, enqueues and waits beside it
    assert tidemill([], "doctor", "--url", place.url).returncode == 0
    jobs = [place.mill.enqueue(task, n) for n in range(3)]
    assert [job.result(timeout=60) for job in jobs] == [0, 2, 4]
    place.mill.queue("letters").put("a")
    with place.mill.queue("letters").get(timeout=60) as letter:
        assert letter.body == "a"
    # then each file is the service user's, and may be written
    strangers = [name for name, found in files(store).items() if found.st_uid != SERVICE]
    assert strangers == []
    # and that worker goes on, and so does the next
    assert place.mill.enqueue(task, 10).result(timeout=60) == 20
    assert worker.stop() == 0
    place.worker(under=as_user(SERVICE)).wait_ready()
    assert place.mill.enqueue(task, 11).result(timeout=60) == 22


def test_a_store_that_root_makes_in_a_service_users_folder_is_that_users(place: Place) -> None:
    # given
    with Tidemill(place.url, allow_imports=["*"]) as mill:
        job = mill.enqueue(place.task("double"), 4)
    # then
    owners = {found.st_uid for found in files(place.path / "store").values()}
    assert owners == {SERVICE}
    place.worker(under=as_user(SERVICE)).wait_ready()
    assert place.mill.job(job.id).result(timeout=60) == 8


def test_files_that_root_once_made_are_given_back_by_root(place: Place) -> None:
    # given the leavings of an earlier version
    place.mill.enqueue(place.task("double"), 4)
    place.mill.close()
    store = place.path / "store"
    for name in files(store):
        os.chown(store / name, 0, 0)
    stopped = tidemill(as_user(SERVICE), "queues", "--url", place.url)
    assert stopped.returncode == 3
    # then the doctor says so
    doctor = tidemill([], "doctor", "--url", place.url)
    assert doctor.returncode == 1
    assert "chown -R" in doctor.stdout
    # and whatever root does next with the store mends it
    job = place.mill.enqueue(place.task("double"), 5)
    place.worker(under=as_user(SERVICE)).wait_ready()
    assert job.result(timeout=60) == 10


def test_a_group_shares_a_store_whose_folder_it_may_write(folder: Path) -> None:  # case S16
    # given a folder of a group
    own(folder / "store", SERVICE, SHARED, 0o2770)
    with open_place(folder) as place:
        place.write("@mill.task\ndef double(n):\n    return 2 * n", load=False)
        place.worker(under=as_user(SERVICE, SHARED)).wait_ready()
        # when another member of the group enqueues, and waits
        code = (
            "print(Tidemill(sys.argv[1], allow_imports=['*']).enqueue(sys.argv[2], 4).result(30))"
        )
        member = as_user(OTHER, SHARED)
        assert python(member, code, place.url, place.task("double")) == "8"
        # then
        for name, found in files(folder / "store").items():
            assert (found.st_gid, found.st_mode & 0o660) == (SHARED, 0o660), name
        # and who is not in the group hears why not
        stranger = tidemill(as_user(OTHER), "queues", "--url", place.url)
        assert stranger.returncode == 3


def test_the_mode_in_the_url_opens_a_store_to_all(folder: Path) -> None:
    url = f"lmdb://{folder}/store?mode=0666"
    code = """
        from tidemill.core.job import Envelope
        broker = open_broker(sys.argv[1])
        broker.put([Envelope(id=sys.argv[2], task="t")])
        broker.wait_for([sys.argv[2]], 0.01)
    """
    python([], code, url, "a")
    os.chmod(folder / "store", 0o777)
    python(as_user(OTHER), code, url, "b")
    python(as_user(SERVICE), code, url, "c")
    assert {found.st_mode & 0o666 for found in files(folder / "store").values()} == {0o666}


def test_a_user_without_rights_is_told_why(folder: Path) -> None:
    # given a store of root's that anybody can see
    url = f"lmdb://{folder}/store"
    open_broker(url).close()
    for verb in ("queues", "doctor"):
        done = tidemill(as_user(SERVICE), verb, "--url", url)
        said = " ".join((done.stdout + done.stderr).split())  # the doctor wraps its lines
        assert "user 12345 may not " in said
        assert "the file belongs to user root, mode 0600" in said


def facts(store: Path) -> dict[str, object]:
    """Whose each file is, its mode, its time and what is in it; readers register in the lock."""
    return {
        name: (found.st_uid, found.st_gid, found.st_mode)
        if name == "lock.mdb"
        else (found[:7], found.st_mtime_ns, hashlib.sha256((store / name).read_bytes()).digest())
        for name, found in files(store).items()
    }


@pytest.mark.parametrize("without", ["", "lock.mdb"])
def test_looking_makes_no_file_and_changes_no_job(folder: Path, without: str) -> None:
    # given a job of an owner that died, one that is due, and no file but LMDB's own
    store, url = folder / "store", f"lmdb://{folder}/store"
    code = """
        import os
        from tidemill.core.job import Envelope
        from tidemill.core.job import Owner
        with Tidemill(sys.argv[1], allow_imports=["*"]) as mill:
            mill.schedules.add("daily", mill.call("math.copysign", 1, -1), every=86400)
            mill.queue("default", rate="1000/s").put("x", delay=1000)
        broker = open_broker(sys.argv[1])
        broker.put([Envelope(id="held", task="t"), Envelope(id="soon", task="t", delay=0.01)])
        broker.attach(Owner(id="o", name="w"))
        broker.exchange(Step("o", want=Want(1)))
        os._exit(0)
    """
    python([], code, url)
    for name in ("wake", "owners", "boards"):
        shutil.rmtree(store / name, ignore_errors=True)
    if without:
        (store / without).unlink()
    before = facts(store)
    for verb in LOOKING:
        words = verb.replace("ID", "held").replace("QUEUE", "default").replace("NAME", "daily")
        # when
        done = CliRunner().invoke(main, [*words.split(), "--url", url])
        # then
        assert done.exit_code == (1 if verb == "doctor" else 0), done.output
        assert facts(store) == before, verb


def test_looking_beside_a_worker_shows_what_it_runs(place: Place) -> None:
    place.worker(under=as_user(SERVICE)).wait_ready()
    job = place.mill.enqueue(place.task("double"), 1)
    job.result(timeout=60)
    assert "1 alive with 4 slots" in tidemill([], "doctor", "--url", place.url).stdout
    assert "succeeded" in tidemill(as_user(SERVICE), "job", job.id, "--url", place.url).stdout


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
@pytest.mark.parametrize("reading", [False, True])
def test_a_link_that_is_planted_while_root_opens_a_store_leads_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, reading: bool
) -> None:
    # given a store in the folder of another user, and a file that is root's
    store = own(folder / "store", SERVICE, SERVICE, 0o700)
    url, victim = f"lmdb://{store}", folder / "victim"
    open_broker(url).close()
    victim.write_bytes(b"")
    victim.chmod(0o600)

    # when the user plants a link to that file after the checks, for the time of LMDB's own open
    def plant(place: environment.Place, **options: bool) -> AbstractContextManager[str]:
        (store / name).rename(store / "aside")
        (store / name).symlink_to(victim)
        return pinned(place, **options)

    pinned = environment.Place.pinned
    monkeypatch.setattr(environment.Place, "pinned", plant)
    with pytest.raises(BrokerUnavailable, match="is not a regular file"):
        open_broker(url, reading=reading)
    # then root's file is as it was
    assert victim.read_bytes() == b""
    assert victim.stat().st_uid == 0
