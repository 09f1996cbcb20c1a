"""An interruption that finds a shield up lands when that shield ends (law 8)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from lmdb_desk import Gate, ids, job

from tidemill import deferral
from tidemill.brokers.base import open_broker
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.context import JobContext
from tidemill.job import Envelope, Lease
from tidemill.retry import JobTimeout, WorkerStopping
from tidemill.shield import aim, lower_shield, raise_shield
from tidemill.worker.interrupt import PATIENCE, Interrupter, Run

LEASE = Lease(1, 1, 0, 0, 0, 0.0, 0.0, 0.0, b"")


class Clerk:
    """The clerk of a worker process: it looks when it is rung for, and when a look is due."""

    def __init__(self) -> None:
        self.interrupter = Interrupter(self.ring)
        self.stuck: list[Run] = []
        self.looks = 0
        self.alarms = 0
        self._bell = threading.Event()
        self._over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def ring(self) -> None:
        self._bell.set()

    def _serve(self) -> None:
        while not self._over:
            at = self.interrupter.next_deadline()
            self._bell.wait(5.0 if at is None else min(0.05, max(0.001, at - time.monotonic())))
            self._bell.clear()
            self.looks += 1
            self.stuck += self.interrupter.look(time.monotonic())

    def close(self) -> None:
        self._over = True
        self.ring()
        self._thread.join()


@pytest.fixture
def clerk() -> Iterator[Clerk]:
    clerk = Clerk()
    yield clerk
    clerk.close()


def run_job(clerk: Clerk, function: Callable[[], None], timeout: float) -> BaseException | None:
    """Run a function as a job with a timeout in this thread; what it raised."""
    envelope = Envelope(id="j")
    run = Run(LEASE, envelope, JobContext(envelope, 1), threading.get_ident())
    run.deadline = time.monotonic() + timeout
    clerk.ring()
    try:
        clerk.interrupter.guarded(run, function)
    except BaseException as error:
        return error
    finally:
        clerk.interrupter.finished(run)
    return None


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def shielded_step(seconds: float) -> None:
    raise_shield()
    try:
        time.sleep(seconds)
    finally:
        lower_shield()


def fan_out(steps: list[int]) -> None:
    """A job that is in the store all the time."""
    while True:
        shielded_step(0.01)
        steps.append(1)


def test_a_job_that_is_always_in_a_store_step_is_interrupted(clerk: Clerk) -> None:
    errors: list[BaseException | None] = []
    steps: list[int] = []
    in_thread(lambda: errors.append(run_job(clerk, lambda: fan_out(steps), 0.05)))
    assert isinstance(errors[0], JobTimeout)
    assert clerk.stuck == []
    assert len(steps) < 20


@pytest.fixture
def alarm(clerk: Clerk) -> Iterator[None]:
    def on_alarm(number: int, frame: FrameType | None) -> None:
        clerk.alarms += 1
        clerk.interrupter.on_alarm(number, frame)

    before = signal.signal(signal.SIGALRM, on_alarm)
    clerk.interrupter.main = threading.get_ident()
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_such_a_job_is_interrupted_in_the_main_thread_too(clerk: Clerk) -> None:
    steps: list[int] = []
    assert isinstance(run_job(clerk, lambda: fan_out(steps), 0.05), JobTimeout)
    assert clerk.stuck == []
    assert len(steps) < 20


@pytest.mark.usefixtures("alarm")
def test_a_long_step_in_the_main_thread_does_not_stop_the_thread_for_good(clerk: Clerk) -> None:
    error = run_job(clerk, lambda: shielded_step(PATIENCE + 0.3), 0.05)
    assert isinstance(error, JobTimeout)
    assert len(clerk.stuck) == 1
    shielded_step(0.0)  # hangs while an aim is left on this thread


def test_a_step_that_outlasts_the_patience_is_stuck_and_ends_with_its_shield(clerk: Clerk) -> None:
    errors: list[BaseException | None] = []
    late: list[float] = []

    def job() -> None:
        shielded_step(PATIENCE + 0.4)
        late.append(time.monotonic())  # nothing of the job runs on behind the shield
        time.sleep(1.0)
        late.append(time.monotonic())

    in_thread(lambda: errors.append(run_job(clerk, job, 0.05)))
    assert [run.token for run in clerk.stuck] == [LEASE.token]
    assert isinstance(errors[0], JobTimeout)
    assert late == []
    assert clerk.looks < 40  # the shield is not polled


def test_an_aim_does_not_outlive_its_job(clerk: Clerk) -> None:
    def jobs() -> None:
        for _ in range(300):
            run_job(clerk, lambda: shielded_step(0.001), 0.002)
        shielded_step(0.0)

    in_thread(jobs)
    assert aim(0)


@pytest.mark.usefixtures("alarm")
def test_a_notice_during_a_wait_for_a_commit_lands_when_the_commit_is_made(
    clerk: Clerk, tmp_path: Path
) -> None:
    # given a job in the main thread whose put waits for a leader
    broker = open_broker(f"lmdb://{tmp_path}/store")
    assert isinstance(broker, LmdbBroker)
    gate = Gate(broker._store)
    steps: list[str] = []

    def put() -> None:
        broker.put([job()])
        steps.append("after the put")

    def notify() -> None:
        while not deferral._waiting[0]:
            os.sched_yield()
        clerk.interrupter.stop_at = time.monotonic()
        clerk.ring()
        while clerk.alarms < 2:
            os.sched_yield()
        gate.release_when(1)

    notifier = threading.Thread(target=notify)
    notifier.start()
    # when the notice comes in that wait
    error = run_job(clerk, put, 3600)  # hangs while an aim is left on this thread
    notifier.join(30)
    # then
    assert isinstance(error, WorkerStopping)
    assert steps == []
    assert len(ids(broker)) == 1
    broker.close()
