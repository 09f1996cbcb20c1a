"""The LMDB store among processes: forks, wake-ups, deaths. All are real."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import pytest
from lmdb_desk import Process, job, until

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Owner, State, Verdict
from tidemill.core.scoreboard import Scoreboard
from tidemill.errors import TidemillError

pytestmark = pytest.mark.everyday


def forked(run: Any) -> int:
    """Run in a forked child; its exit code, 0 when nothing was raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- fork ----------------------------------------------------------------------------------------


def test_after_a_fork_both_work(broker: LmdbBroker) -> None:
    # case Q12
    broker.put([job(id="before")])
    broker.attach(Owner(id="parent", name="p"))
    broker.exchange(Step("parent", want=Want(1)))

    def child() -> None:
        broker.put([job(id="child")])
        assert broker.get("before").state is State.RUNNING
        with pytest.raises(TidemillError, match="not attached"):
            broker.exchange(Step("parent"))
        broker.attach(Owner(id="c", name="c"))
        assert len(broker.exchange(Step("c", want=Want(1))).leases) == 1
        assert forked(lambda: broker.put([job(id="grandchild")])) == 0
        broker.close()
        again = open_broker(broker.url)
        again.put([job(id="again")])
        again.close()

    assert forked(child) == 0
    broker.put([job(id="after")])
    broker.tick()
    ids = {r.envelope.id for r in broker.find(Filter()).records}
    assert ids == {"before", "child", "grandchild", "again", "after"}
    assert [o.id for o in broker.owners()] == ["parent"]
    assert broker.get("before").state is State.RUNNING


def test_a_fork_leaves_the_readers_of_its_parent_alone(broker: LmdbBroker) -> None:
    # case Q12: a slot freed by the child would let writers overwrite what the parent reads
    broker.put([job()])
    with broker._store.env.begin() as txn:
        shown = broker._store.env.readers()
        assert str(os.getpid()) in shown

        def child() -> None:
            broker.put([job()])
            broker.close()

        assert forked(child) == 0
        assert broker._store.env.readers() == shown
        assert txn.stat(broker._store.tables.job)["entries"] == 1


def test_a_fork_while_other_threads_write(broker: LmdbBroker) -> None:
    # case Q12
    import threading

    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            broker.put([job()])

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert forked(lambda: broker.put([job(queue="children")])) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert {row.name: row.ready for row in broker.stats()}["children"] == 5


def test_a_child_that_does_nothing_does_not_keep_its_parent_alive(
    url: str, broker: LmdbBroker
) -> None:
    # law 5: the descriptors are closed at the fork, not at the first use
    broker.put([job(id="a")])
    code = """
        broker.attach(Owner(id="o", name="w", kind="consumer"))
        broker.attach(Owner(id="p", name="x", kind="consumer"))
        take("o")
        child = os.fork()
        if child == 0:
            say("child")
            sys.stdin.read()  # until the test ends
            os._exit(0)
        time.sleep(60)
    """
    with Process(url, code) as process:
        process.expect("child")
        process.kill()
        broker.tick()
        assert broker.owners() == []
        assert broker.get("a").state is State.READY


def test_a_store_in_the_callers_environment_says_what_to_do_after_a_fork(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), map_size=1 << 26, max_dbs=20, lib_version=0) as env:
        guest = LmdbBroker.around(env, "tm-")

        def child() -> None:
            for _ in range(2):
                with pytest.raises(TidemillError, match="fork"):
                    guest.put([job()])

        assert forked(child) == 0
        guest.put([job()])
        guest.close()


# -- waking --------------------------------------------------------------------------------------


def test_a_put_wakes_a_sleeper_in_another_process_at_once(url: str, broker: LmdbBroker) -> None:
    # case Q2: by an event, not by looking again and again
    code = """
        broker.attach(Owner(id="o", name="w"))
        waits = 0
        while not (leases := take("o")):
            say("sleeping") if waits == 1 else None  # the first may return for what was before
            waits += 1
            broker.wait("o", 25)
        say(f"{leases[0].open().id} {waits <= 3}")
    """
    with Process(url, code) as process:
        process.expect("sleeping")
        start = time.monotonic()
        broker.put([job(id="a")])
        process.expect("a True")
        assert time.monotonic() - start < 15


def test_a_result_wakes_who_waits_in_another_process(url: str, broker: LmdbBroker) -> None:
    # case T16
    broker.put([job(id="a")])
    broker.attach(Owner(id="o", name="w"))
    [lease] = broker.exchange(Step("o", want=Want(1))).leases
    code = """
        say("waiting")
        [record] = broker.wait_for(["a"], 25)
        say(record.state)
    """
    with Process(url, code) as process:
        process.expect("waiting")
        broker.exchange(Step("o", verdicts=[Verdict(lease.token, 0)]))
        start = time.monotonic()
        process.expect("succeeded")
        assert time.monotonic() - start < 15


def test_a_producer_with_sigpipe_at_its_default_survives_a_dead_sleeper(url: str) -> None:
    sleeper = """
        broker.attach(Owner(id="dead", name="w"))
        broker.exchange(Step("dead", want=Want(1)))
        say("asleep")
        sys.stdin.readline()
        take("dead")
        say("asleep again")
        time.sleep(60)
    """
    producer = """
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        broker.put([Envelope(id="a", task="t")])
        say("known")
        sys.stdin.readline()
        broker.put([Envelope(id="b", task="t")])
        say("alive")
    """
    # given a producer that has the sleeper's FIFO open
    with Process(url, sleeper) as one, Process(url, producer) as two:
        one.expect("asleep")
        two.expect("known")
        for process, answer in ((one, "asleep again"), (two, "alive")):
            process.tell()
            process.expect(answer)
            if process is one:  # when it dies in its sleep
                one.kill()


# -- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("witness", ["board", "no board"])
def test_a_killed_workers_jobs_are_accounted_by_its_board(
    url: str, broker: LmdbBroker, witness: str
) -> None:
    # law 6, case T9, case T10
    broker.put([job(id="ran"), job(id="held")])
    path = os.path.join(broker.boards, "board")
    board = Scoreboard(path, 4)
    broker.attach(Owner(id="me", name="m"))
    code = f"""
        from tidemill.core.scoreboard import Scoreboard
        broker.attach(Owner(id="o", name="dead", board={path!r}))
        one, two = take("o", 2)
        board = Scoreboard({path!r}, 4)
        board.claim("o")
        board.start(1, one.token, 1, 10.0, 0.0)
        say("running")
        time.sleep(60)
    """
    with Process(url, code) as process:
        process.expect("running")
        if witness == "no board":
            board.remove()
        process.kill()
        until(broker, "me", lambda: broker.get("ran").state is State.READY)
    assert os.listdir(broker.boards) == []  # whoever reaps takes it away
    ran, held = broker.get("ran"), broker.get("held")
    if witness == "board":
        assert (ran.attempt, ran.losses) == (1, 0)
        assert "dead" in ran.attempts[0].error
        assert (held.attempt, held.losses) == (0, 0)
    else:
        assert (ran.attempt, ran.losses) == (0, 1)
        assert (held.attempt, held.losses) == (0, 1)


def test_accepted_jobs_survive_a_kill(url: str, broker: LmdbBroker) -> None:
    # case Q7, law 1
    code = """
        for n in range(50):
            broker.put([Envelope(id=f"j{n:02}", task="t")])
        say("accepted")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with Process(url, code) as process:
        process.expect("accepted")
        process.popen.wait(30)
    assert [r.envelope.id for r in broker.find(Filter()).records] == [
        f"j{n:02}" for n in reversed(range(50))
    ]
