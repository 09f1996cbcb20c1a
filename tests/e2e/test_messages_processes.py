"""Messages and results between processes, on LMDB: wake-ups, kills, forks, transactions."""

from __future__ import annotations

import asyncio
import collections
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tidemill import JobFailed, ResultTimeout, Tidemill, TidemillError
from tidemill.testing import worker

pytestmark = pytest.mark.everyday

PRELUDE = """
import sys, os, time
from tidemill import *
mill = Tidemill(sys.argv[1])
q = mill.queue("q")
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, from any thread
"""


class Other:
    """Another Python on the same store; ``line`` is what it says next."""

    def __init__(self, url: str, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        said = self.process.stdout.readline().strip()
        assert said, "it ended without a word"
        return said

    def tell(self, word: str = "") -> None:
        """Give it the line it waits for."""
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def mill(tmp_path: Path) -> Iterator[Tidemill]:
    with Tidemill(f"lmdb://{tmp_path}/store") as mill:
        yield mill


@pytest.fixture
def other(mill: Tidemill) -> Iterator[Any]:
    started: list[Other] = []

    def start(code: str) -> Other:
        started.append(Other(mill.url, code))
        return started[-1]

    yield start
    for process in started:
        process.close()


def test_a_put_of_another_process_wakes_the_get(mill: Tidemill, other: Any) -> None:
    # case Q2
    putter = other("say('up'); sys.stdin.readline(); q.put(time.monotonic()); sys.stdin.readline()")
    assert putter.line() == "up"
    threading.Timer(0.3, putter.tell).start()
    message = mill.queue("q").get(timeout=30)
    woken = time.monotonic()
    assert message is not None
    assert woken - message.body < 10  # monotonic time is the machine's; the commit is in it too
    assert message.ack()


def test_a_put_that_returned_survives_the_kill_of_its_producer(mill: Tidemill, other: Any) -> None:
    # case Q7
    producer = other(
        """
        for number in range(10**9):
            q.put(number)
            say(number)
        """
    )
    for _ in range(50):
        said = int(producer.line())
    producer.kill()
    rest = producer.process.stdout.read().split()
    kept = max([said, *map(int, rest)])
    found = []
    while (message := mill.queue("q").get(timeout=0)) is not None:
        found.append(message.body)
        message.ack()
    assert found == list(range(len(found)))
    assert len(found) in (kept + 1, kept + 2)  # one more may have been put and not said


def test_a_dead_consumers_message_comes_to_one_that_waits(mill: Tidemill, other: Any) -> None:
    # case Q7, law 5
    mill.queue("q").put("mine", ttr=3600)
    consumer = other("m = q.get(30); say(m.body, m.attempt); sys.stdin.readline()")
    assert consumer.line() == "mine 1"
    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        consumer.kill()

    timer = threading.Timer(0.3, kill)
    timer.start()
    message = mill.queue("q").get(timeout=60)
    took = time.monotonic() - (killed or [0.0])[0]
    timer.join()
    assert message is not None
    assert (message.body, message.attempt) in (("mine", 1), ("mine", 2))
    assert took < 10  # promised within one second; the machine may be busy
    assert message.ack()


def test_two_producers_two_consumers_and_every_item_once(mill: Tidemill, other: Any) -> None:
    # case Q8, small
    count = 300
    producers = [
        other(f"for n in range({count}): q.put(({name!r}, n))\nsay('done')") for name in "ab"
    ]
    consumers = [
        other(
            """
            import threading
            def take():
                while (m := q.get(timeout=60)).body is not None:
                    with m:
                        say(*m.body)
                m.ack()
            threads = [threading.Thread(target=take) for _ in range(5)]
            for t in threads: t.start()
            for t in threads: t.join()
            say("done")
            """
        )
        for _ in range(2)
    ]
    for producer in producers:
        assert producer.line() == "done"
    mill.queue("q").put_many([None] * 10)
    seen = collections.Counter(
        line for consumer in consumers for line in iter(consumer.line, "done")
    )
    assert len(seen) == 2 * count
    assert set(seen.values()) == {1}
    assert mill.queue("q").size() == 0


def test_fork_after_open(mill: Tidemill) -> None:
    # case Q12
    @mill.task
    def task() -> None: ...

    orders = mill.queue("q")
    orders.put("before")
    assert orders.get(timeout=0).ack()  # type: ignore[union-attr]  # an owner of the parent's
    for _ in range(3):
        child = os.fork()
        if not child:
            code = 1
            try:
                orders.put("of the child")
                task.enqueue()
                asyncio.run(orders.aput("of the child's loop"))
                with orders.get(timeout=30) as message:  # type: ignore[union-attr]
                    code = 0 if message.body == "of the child" else 2
                mill.close()
            finally:
                os._exit(code)
        orders.put("of the parent", priority=-1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found = [orders.get(5), orders.get(5)]
        assert sorted(m.body for m in found if m) == ["of the child's loop", "of the parent"]
        assert all(m.ack() for m in found if m)
    assert orders.size() == 0
    assert sum(s.ready for s in mill.queues()) == 3


def test_puts_inside_the_callers_transaction(tmp_path: Path) -> None:
    # case Q4, Q5, law 17
    with (
        lmdb.open(f"{tmp_path}/mine", max_dbs=40, map_size=1 << 28) as env,
        Tidemill(env=env, prefix="jobs-") as mill,
    ):
        accounts, orders = env.open_db(b"accounts"), mill.queue("q")

        @mill.task
        def bill(number: int) -> None: ...

        got: list[Any] = []
        consumer = threading.Thread(target=lambda: got.append(mill.get(["q", "queue2"], 30)))
        consumer.start()
        # on an exception nothing is there
        with pytest.raises(ZeroDivisionError), env.begin(write=True) as txn:  # noqa: PT012
            txn.put(b"a", b"1", db=accounts)
            orders.put(1, txn=txn)
            bill.using(txn=txn).enqueue(1 // 0)
        assert mill.queues() == []
        # with the commit everything is, and no consumer sees it before
        with env.begin(write=True) as txn:
            txn.put(b"a", b"1", db=accounts)
            job = orders.put("first", txn=txn)
            mill.queue("queue2").put("second", txn=txn)
            mill.enqueue_many([bill.using(txn=txn).call(n) for n in range(2)])
            consumer.join(0.3)
            assert got == []
        consumer.join(30)
        [message] = got
        assert (message.id, message.body) == (job.id, "first")
        assert message.ack()
        assert mill.queue("queue2").get(5).body == "second"  # type: ignore[union-attr]
        assert sum(s.ready for s in mill.queues()) == 2
        with env.begin(write=True), pytest.raises(TidemillError, match="txn="):
            orders.put("without saying so")


def test_a_txn_needs_a_broker_with_transactions() -> None:
    with Tidemill("memory://") as mill:
        mill.task(name="nothing")(print)
        call = mill.tasks["nothing"].using(txn=object())
        for put in (call.enqueue, lambda: mill.queue("q").put(1, txn=object())):
            with pytest.raises(TidemillError, match=r"txn= needs .*transactions.*memory://"):
                put()


def test_results_reach_another_process(mill: Tidemill, other: Any) -> None:
    # case T16
    @mill.task(name="half", retries=0)
    def half(number: int) -> int:
        if number % 2:
            raise ValueError("odd")
        return number // 2

    asker = other(
        """
        import asyncio
        @mill.task(name="half")
        def half(number): ...
        good, bad = half.using(retries=0).enqueue(4), half.using(retries=0).enqueue(3)
        try: good.result(timeout=0.05)
        except ResultTimeout: say("timeout")
        say("go")
        say(good.result(timeout=60))
        try: asyncio.run(bad.aresult(timeout=60))
        except JobFailed as error: say(error.error, "raise ValueError" in error.traceback)
        try: mill.job("none").result(timeout=1)
        except JobNotFound as error: say(type(error).__name__)
        """
    )
    assert asker.line() == "timeout"
    assert asker.line() == "go"
    with worker(mill):
        assert asker.line() == "2"
        assert asker.line() == "ValueError: odd True"
        assert asker.line() == "JobNotFound"
    job = half.enqueue(1)
    with pytest.raises(ResultTimeout):
        job.result(timeout=0.01)
    with worker(mill), pytest.raises(JobFailed):
        job.result(timeout=30)


def test_the_same_directory_twice_in_one_process(mill: Tidemill) -> None:
    # case Q12
    with Tidemill(mill.url) as again:
        mill.queue("q").put("shared")
        message = again.queue("q").get(timeout=5)
        assert message is not None
        assert message.ack()
    mill.queue("q").put("and after the other was closed")
    assert mill.queue("q").get(5)
