"""Waiting for another process that holds the write lock of an LMDB store, and does not go on."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from harness import eventually
from lmdb_desk import Process, ids, in_threads, job, join

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine import group_commit
from tidemill.brokers.registry import open_broker
from tidemill.client import messages
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable, StoreBusy

pytestmark = pytest.mark.everyday

IN_A_COMMIT = """
    def stay(moves):
        moves.count_up("owners")
        say("inside")
        sys.stdin.readline()
    broker._store.commits.run(broker._transitions, stay)
    say("done")
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?patience=60"


@pytest.fixture
def holder(url: str) -> Iterator[Process]:
    """A process that is stopped inside a write transaction."""
    with Process(url, IN_A_COMMIT) as process:
        process.expect("inside")
        os.kill(process.popen.pid, signal.SIGSTOP)
        _await_state(process.popen.pid, "T")
        yield process
        process.popen.send_signal(signal.SIGCONT)


def _await_state(pid: int, state: str) -> None:
    while f"State:\t{state}" not in Path(f"/proc/{pid}/status").read_text():
        os.sched_yield()


def go_on(holder: Process) -> None:
    """Let the holder end its transaction."""
    os.kill(holder.popen.pid, signal.SIGCONT)
    holder.tell()
    holder.expect("done")


@pytest.fixture
def broker(url: str) -> Iterator[LmdbBroker]:
    """Opened before there is a holder."""
    broker = open_broker(url)
    broker.put([job(id="before")])
    yield broker
    broker.close()


def test_a_put_names_the_stopped_process_that_holds_the_lock(
    broker: LmdbBroker, holder: Process
) -> None:
    pid = holder.popen.pid
    broker._store.commits.patience = 0.5
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match=rf"process {pid} \(.*stopped.*-CONT {pid}"):
            broker.put([job(id="refused")])
    # when the holder goes on
    broker._store.commits.patience = 60
    go_on(holder)
    # then writing works again, and what was refused is not stored
    broker.put([job(id="after")])
    assert ids(broker) == {"before", "after"}


@pytest.mark.parametrize("end", [go_on, Process.kill], ids=["goes on", "is killed"])
def test_puts_go_on_when_the_holder_goes_on_or_is_killed(
    broker: LmdbBroker, holder: Process, end: Callable[[Process], None]
) -> None:
    broker._store.commits.patience = 60
    threads, answers = in_threads([lambda: broker.put([job()]) for _ in range(3)])
    while len(broker._store.commits.pending) < 3:
        os.sched_yield()
    end(holder)
    join(threads)
    assert [type(answer) for answer in answers] == [list] * 3
    assert len(ids(broker)) == 4


def test_ctrl_c_ends_a_wait_for_the_lock(broker: LmdbBroker, holder: Process) -> None:
    broker._store.commits.patience = 3600
    main, came = threading.main_thread().ident or 0, threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        came.set()
        raise KeyboardInterrupt

    def press() -> None:
        while not broker._store.commits.pending:
            os.sched_yield()
        while not came.wait(0.1):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, handler)
    presser = threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            broker.put([job(id="interrupted")])
    finally:
        presser.join(30)
        signal.signal(signal.SIGINT, before)
    go_on(holder)
    broker.put([job(id="after")])
    assert ids(broker) == {"before", "after"}


def test_a_fork_does_not_wait_for_the_holder(broker: LmdbBroker, holder: Process) -> None:
    broker._store.patience = broker._store.commits.patience = 40
    threads, _ = in_threads([lambda: broker.put([job()])])
    while not broker._store.commits.pending or not broker._store.environment.write_lock.busy:
        os.sched_yield()
    time.sleep(0.2)  # until the writer thread is as far as the holder lets it
    begin = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(7)
    assert time.monotonic() - begin < 20  # far less than the patience
    go_on(holder)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    join(threads)


def test_a_get_of_messages_keeps_its_own_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # case M13
    with Tidemill(url.replace("=60", "=3600")) as mill:
        queue = mill.queue("a")
        assert queue.get(timeout=0) is None
        with Process(url, IN_A_COMMIT) as holder:
            holder.expect("inside")
            assert queue.get(timeout=0.1) is None
            assert queue.get(timeout=1.2) is None
            # after a pause of the caller, the time of the busy store begins anew
            monkeypatch.setattr(messages, "BUSY_MOST", 1.5)
            with monkeypatch.context() as patch:
                patch.setattr(messages, "_PAUSE_MOST", -1.0)
                assert queue.get(timeout=0.1) is None
            # the lock has been held for long: somebody must hear of that
            with pytest.raises(StoreBusy, match=f"process {holder.popen.pid}"):
                queue.get(timeout=0.1)
            go_on(holder)
        message = queue.put("x") and queue.get(timeout=60)
        message.ack()


def test_an_owner_leaves_though_the_lock_is_held(broker: LmdbBroker) -> None:
    """A supervisor's steps end within a second, whatever the patience of puts is."""
    broker.attach(Owner(id="o", name="w"))
    broker._store.commits.patience = 3600
    with Process(broker.url, IN_A_COMMIT) as holder:
        holder.expect("inside")
        with pytest.raises(BrokerUnavailable, match=f"process {holder.popen.pid}"):
            broker.exchange(Step("o", want=Want(1)))
        with pytest.raises(BrokerUnavailable, match="1 s"):
            broker.detach("o")
        go_on(holder)
    # then others find it gone, and reap it
    assert not any(owner.id == "o" for owner in broker.owners())
    assert eventually(functools.partial(reaped, broker), "one is reaped") == 1


def reaped(broker: LmdbBroker) -> int:
    """How many owners are reaped; none while the disk is slow."""
    with contextlib.suppress(BrokerUnavailable):
        return broker.reap()
    return 0


def test_a_long_wait_names_the_holder_once(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # case M13
    monkeypatch.setattr(group_commit, "LONG", 0.1)
    with Process(broker.url, IN_A_COMMIT) as holder:
        holder.expect("inside")
        threads, _ = in_threads([lambda: broker.put([job()])] * 3)
        eventually(lambda: "has not been free" in caplog.text, "the log says so")
        go_on(holder)
        join(threads)
    assert caplog.text.count(f"held by process {holder.popen.pid} (") == 1


def test_opening_a_store_ends_with_a_sentence_when_the_lock_is_held(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    with Process(url, IN_A_COMMIT) as holder:
        holder.expect("inside")
        with pytest.raises(BrokerUnavailable, match=f"process {holder.popen.pid} "):
            open_broker(f"{url}?patience=0.5")
        go_on(holder)


def test_the_doctor_names_a_stopped_process_that_keeps_others_from_writing(
    broker: LmdbBroker, holder: Process
) -> None:
    url = broker.url.partition("?")[0] + "?patience=0.5"
    command = [sys.executable, "-m", "tidemill", "doctor", "--json", "--url", url]
    doctor = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert doctor.returncode == 1
    (check,) = [c for c in json.loads(doctor.stdout)["checks"] if c["check"] == "writable"]
    assert check["status"] == "fail"
    assert f"process {holder.popen.pid} " in check["message"]
    assert f"kill -CONT {holder.popen.pid}" in check["message"]
