"""A runner of a bulk operation is stopped or killed: another goes on; no piece is done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import postgres_store, redis_url

from tidemill import Fail, Tidemill
from tidemill.brokers.generic.audit import notes
from tidemill.core.clock import new_id
from tidemill.dashboard import bulk
from tidemill.dashboard.bulk import Bulk
from tidemill.testing import run_all

STORES: dict[str, Callable[[Path], str]] = {
    "lmdb": lambda folder: f"lmdb://{folder}/store",
    "redis": lambda folder: f"{redis_url()}?prefix=t{new_id()}",
    "postgresql": lambda folder: postgres_store(f"t{new_id()}"),
}

RUNNER = """
import signal, sys, threading
from tidemill import Tidemill
from tidemill.dashboard import bulk

act, sent = bulk.act, [0]

def hit(when):
    if when == sys.argv[2] and sent[0] == 2:  # at the second piece
        # At once: this thread alone gets the signal, and the process stops before it goes on.
        signal.pthread_kill(threading.get_ident(), getattr(signal, sys.argv[3]))

def act_on(*args):
    sent[0] += 1
    hit("before")
    done = act(*args)
    hit("after")
    return done

bulk.act = act_on
mill = Tidemill(sys.argv[1])
bulk.start(mill, bulk.Bulk(id=sys.argv[4], action="retry", query="state:failed", rate=5))
for thread in threading.enumerate():
    if thread.name.startswith("bulk-"):
        thread.join()
"""


@pytest.fixture(params=STORES)
def mill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tidemill]:
    with Tidemill(STORES[request.param](tmp_path)) as mill:

        @mill.task(name="shop.pay", retries=0)
        def pay(order: int) -> None:
            raise Fail("the bank is closed")

        mill.enqueue_many([pay.call(n) for n in range(12)])
        run_all(mill)
        yield mill


def runner(mill: Tidemill, when: str, how: str) -> subprocess.Popen[bytes]:
    """A process with an operation on 12 jobs, stopped or killed at the second piece of 5 jobs."""
    command = [sys.executable, "-c", RUNNER, mill.url, when, how, new_id()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return process


def taken_over(mill: Tidemill) -> Bulk:
    """The operation after another runner has gone on with it."""
    [one] = bulk.operations(mill)
    one.beat -= 60
    assert one.shown_state == "interrupted"
    one.rate = 0
    bulk.resume(mill, one)
    for thread in threading.enumerate():
        if thread.name.startswith("bulk-"):
            thread.join(60)
            assert not thread.is_alive()
    return bulk.get(mill, one.id)


def states(mill: Tidemill) -> list[str]:
    return [job.state for job in mill.jobs()]


def test_a_stopped_runner_that_comes_back_ends(mill: Tidemill) -> None:
    with runner(mill, "after", "SIGSTOP") as process:
        try:
            # given a runner that is stopped after an act, and another runner that goes on
            one = taken_over(mill)
            # when
            process.send_signal(signal.SIGCONT)
            _, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    # then
    assert process.returncode == 0, errors
    assert one.state == "done"
    assert bulk.get(mill, one.id) == one
    assert states(mill) == ["ready"] * 12
    assert [note.what for note in notes(mill.broker)] == [
        "finished bulk retry",
        "started bulk retry",
    ]


def test_a_repeated_piece_leaves_out_jobs_that_failed_again(mill: Tidemill) -> None:
    with runner(mill, "after", "SIGKILL"):
        pass
    run_all(mill)  # the 10 retried jobs fail again
    one = taken_over(mill)
    assert one.state == "done"
    assert sorted(states(mill)) == ["failed"] * 10 + ["ready"] * 2
