"""A store that does not answer holds up no timeout and no signal (law 8)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SLACK, Place, alive, eventually, runs_of
from stalls import KINDS, Lock, open_stalling

from tidemill.brokers.contract.features import Feature
from tidemill.core.job import Record, State

APP = """
@mill.task(timeout=1.0, retries=0)
def spins():
    begin()
    until = time.time() + 60
    try:
        while time.time() < until: pass
    finally:
        end()

@mill.task(timeout=1.0, retries=0)
def sleeps():
    begin()
    time.sleep(60)

@mill.task(timeout=1.0, retries=0)
def holds():
    begin()
    hold_gil(60)

@mill.task
def long():
    begin()
    time.sleep(60)

@mill.task
def brief():
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.005)
    end()
"""
TIMEOUT = 1.0
NETWORKS = ["http", "rabbitmq", "redis", "redis-paused"]
INSPECTED = sorted(KINDS.keys() - {"rabbitmq"})
"""Stores that show what became of a job that succeeded, and who their workers are."""


@pytest.fixture(params=sorted(KINDS))
def stalling(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Place, Lock]]:
    with open_stalling(request.param, tmp_path) as (place, lock):
        place.write(APP)
        assert sum(row.size for row in place.mill.queues()) == 0  # it is open
        yield place, lock


@pytest.mark.parametrize("name", ["sleeps", "holds"])
def test_a_timeout_falls_while_the_store_is_stalled(
    stalling: tuple[Place, Lock], name: str
) -> None:
    # given: a job that nothing can interrupt
    place, stalled = stalling
    worker = place.worker(slots=2).wait_ready()
    (old,) = [child.pid for child in eventually(worker.children, "the process")]
    job = place.enqueue(name)
    place.wait_notes("begin")
    # when
    with stalled(place):
        # then: its process is replaced and killed while nothing can be stored
        worker.wait_line("is stuck and is replaced")
        eventually(lambda: not alive(old), "the stuck process is killed")
        eventually(worker.children, "its replacement")
    check_timed_out(place, job)
    assert worker.stop() == 0


@pytest.mark.parametrize("name", ["spins", "sleeps"])
@pytest.mark.parametrize("stalling", NETWORKS, indirect=True)
def test_a_step_that_was_given_up_in_a_stall_is_stored_once(
    stalling: tuple[Place, Lock], name: str
) -> None:
    place, stalled = stalling
    worker = place.worker(slots=3).wait_ready()
    job, neighbour = place.enqueue(name), place.enqueue("brief")
    place.wait_notes("begin", 2)
    with stalled(place):
        (place.path / "go").touch()
        worker.wait_line("trying again")
    check_timed_out(place, job)
    check_settled_once(place, neighbour)
    place.wait_notes(f"end {place.enqueue('brief').id}")
    assert worker.stop() == 0


@pytest.mark.everyday("redis")
@pytest.mark.parametrize("kind", ["http", "redis", "redis-paused"])
def test_a_stall_longer_than_the_owner_lease_gives_up_nobody(kind: str, tmp_path: Path) -> None:
    # laws 5, 19: nobody could be heard
    lease = 5  # time enough for both workers to come back in
    with open_stalling(kind, tmp_path, f"?owner_lease={lease}") as (place, stalled):
        # given: two workers, and a job that runs in each
        place.write(APP)
        workers = [place.worker(slots=1).wait_ready() for _ in range(2)]
        jobs = [place.enqueue("brief") for _ in workers]
        place.wait_notes("begin", 2)
        # when
        began = time.monotonic()
        with stalled(place):
            for worker in workers:
                worker.wait_line("trying again")
            eventually(lambda: time.monotonic() - began > lease + 1, "a long stall")
        for worker in workers:
            worker.wait_line("the broker is back")
        (place.path / "go").touch()
        # then
        for job in jobs:
            check_settled_once(place, job)
        assert [worker.stop() for worker in workers] == [0, 0]


def check_timed_out(place: Place, job: Any) -> None:
    """It has used its one attempt, for no longer than it may."""
    record = settled(place, job)
    assert (record.state, record.attempt) == (State.FAILED, 1)
    assert "JobTimeout" in record.error
    for attempt in record.attempts:
        assert TIMEOUT <= attempt.ended - attempt.started + 0.01 <= TIMEOUT + 1.0 + SLACK
    ((begun, ended),) = runs_of(place.ledger())[job.id]
    assert ended is None or ended.time - begun.time <= TIMEOUT + 1.0 + SLACK


def settled(place: Place, job: Any) -> Record:
    """What became of a job that failed."""
    if Feature.INSPECT in place.mill.broker.features:
        (record,) = place.finish([job])
        assert record.attempts
        return record

    def found() -> list[Record]:
        failed = [it.record for it in place.mill.jobs(state="failed")]
        return [record for record in failed if record.envelope.id == job.id]

    (record,) = eventually(found, "the job is among those that failed")
    return record


def check_settled_once(place: Place, job: Any) -> None:
    """It ran once, succeeded, and nobody holds it."""
    if Feature.INSPECT in place.mill.broker.features:
        (record,) = place.finish([job])
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
    eventually(lambda: not place.unfinished(), "nobody holds it")
    assert len(runs_of(place.ledger())[job.id]) == 1


@pytest.mark.parametrize("stalling", INSPECTED, indirect=True)
@pytest.mark.parametrize("never", [False, True], ids=["answers", "never"])
def test_a_worker_ends_while_the_store_is_stalled(
    stalling: tuple[Place, Lock], never: bool
) -> None:
    # case T11
    place, stalled = stalling
    worker = place.worker("--shutdown-timeout", "0.5", slots=2).wait_ready()
    (old,) = [child.pid for child in eventually(worker.children, "the process")]
    job = place.enqueue("long")
    place.wait_notes("begin")
    with stalled(place):
        worker.send(signal.SIGTERM)
        eventually(lambda: not alive(old), "the process is killed at the shutdown timeout")
        if never:
            assert worker.wait() == 1
    assert worker.wait() == 1
    if not never:
        record = job.refresh()
        assert (record.state, record.attempt) == (State.READY, 0)
