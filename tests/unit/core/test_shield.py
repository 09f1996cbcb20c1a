"""No exception for a job lands inside a shielded stretch, whoever is faster (law 8).

An interruption that finds a shield up lands when that shield ends.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import pytest
from harness import eventually

from tidemill.client.context import JobContext
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease
from tidemill.core.retry import JobTimeout
from tidemill.core.signals import aim_at, end_aim, lower_shield, raise_shield
from tidemill.worker import timeouts as module
from tidemill.worker.execute import Run
from tidemill.worker.timeouts import Timeouts

PATIENCE = 0.4
LEASE = Lease(1, 1, 0, 0, 0, 0.0, 0.0, 0.0, b"")


def run_here() -> Run:
    """A run in this thread; its task is of no account here."""
    envelope, task = Envelope(id="j"), cast(Any, None)
    context = JobContext(envelope, 1)
    return Run(LEASE.token, LEASE, envelope, task, context, threading.get_ident(), 0.0)


def may_interrupt(ident: int) -> bool:
    """Whether no shield of the thread is left."""
    try:
        return aim_at(ident)
    finally:
        end_aim(ident)


class Victim:
    """A thread that runs one function as a job."""

    def __init__(self, timeouts: Timeouts, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.run: Run | None = None
        self._function = function
        self._timeouts = timeouts
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        self.run = run_here()
        try:
            self._timeouts.guarded(self.run, self._function)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()


def test_a_shield_that_is_up_is_respected() -> None:
    ident = threading.get_ident()
    raise_shield()
    raise_shield()
    lower_shield()
    assert not aim_at(ident)
    end_aim(ident)
    lower_shield()
    assert aim_at(ident)
    end_aim(ident)


def test_a_step_does_not_begin_between_the_look_and_the_shot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timekeeper sees no shield; a store step begins before the exception is sent."""
    step, landed, timeouts = threading.Event(), [], Timeouts(PATIENCE)
    ready, inside = threading.Event(), threading.Event()
    send = module._set_async_exc

    def slow(ident: Any, kind: Any) -> Any:
        step.set()  # the job goes on now …
        inside.wait(0.2)  # … and would be in its step long before this is over
        return send(ident, kind)

    def job() -> None:
        ready.set()
        step.wait()
        raise_shield()
        try:
            inside.set()
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                pass
        except BaseException as error:
            landed.append(error)
            raise
        finally:
            lower_shield()

    monkeypatch.setattr(module, "_set_async_exc", slow)
    victim = Victim(timeouts, job)
    ready.wait()
    victim.run.interrupt_by = JobTimeout
    timeouts.look(time.monotonic())
    victim.join()
    assert isinstance(victim.error, JobTimeout)
    assert landed == []
    assert may_interrupt(victim.run.ident)


@pytest.fixture
def fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("fast_switching")
def test_a_hundred_shots_hit_nothing_shielded() -> None:
    timeouts = Timeouts(PATIENCE)
    wrong: list[BaseException] = []

    def job() -> None:
        while True:
            raise_shield()
            try:
                sum(range(20))
            except BaseException as error:
                wrong.append(error)
                raise
            finally:
                lower_shield()

    for _ in range(120):
        victim = Victim(timeouts, job)
        while not timeouts.running:
            time.sleep(0)
        (run,) = timeouts.running.values()
        run.interrupt_by = JobTimeout
        while timeouts.running:
            timeouts.look(time.monotonic())
        victim.join()
        assert isinstance(victim.error, JobTimeout)
        assert may_interrupt(run.ident)
        timeouts.finished(run)
    assert wrong == []


# -- an interruption that finds a shield up lands when that shield ends ----------------------------


class Timekeeper:
    """The timekeeper of a worker process: it looks when it is rung for, and when a look is due."""

    def __init__(self) -> None:
        self.timeouts = Timeouts(PATIENCE, self.ring)
        self.stuck: list[Run] = []
        self.looks = 0
        self.alarms = 0
        self._bell = threading.Lock()
        self._over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def ring(self) -> None:
        """In one call: an interruption inside an ``Event`` would leave its lock taken for ever."""
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def _serve(self) -> None:
        while not self._over:
            at = self.timeouts.next_deadline()
            wait = 5.0 if at is None else min(0.05, max(0.001, at - time.monotonic()))
            self._bell.acquire(timeout=wait)
            self.looks += 1
            self.stuck += self.timeouts.look(time.monotonic())

    def close(self) -> None:
        self._over = True
        self.ring()
        self._thread.join()


@pytest.fixture
def timekeeper() -> Iterator[Timekeeper]:
    timekeeper = Timekeeper()
    yield timekeeper
    timekeeper.close()


def run_job(
    timekeeper: Timekeeper, function: Callable[[], None], timeout: float
) -> BaseException | None:
    """Run a function as a job with a timeout in this thread; what it raised."""
    run = run_here()
    run.deadline = time.monotonic() + timeout
    timekeeper.ring()
    try:
        timekeeper.timeouts.guarded(run, function)
    except BaseException as error:
        return error
    finally:
        timekeeper.timeouts.finished(run)
    return None


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()


def shielded_step(seconds: float) -> None:
    raise_shield()
    try:
        time.sleep(seconds)
    finally:
        lower_shield()


def step_until_stuck(timekeeper: Timekeeper) -> None:
    """A step that goes on after the timekeeper has given its job up as stuck."""
    raise_shield()
    try:
        eventually(lambda: timekeeper.stuck, "a stuck job")
        time.sleep(PATIENCE)
    finally:
        lower_shield()


class FanOut:
    """A job that is in the store all the time.

    Attributes:
        aimed_at: the number of its steps right after each aim of the timekeeper.
    """

    def __init__(self, timekeeper: Timekeeper, monkeypatch: pytest.MonkeyPatch) -> None:
        timekeeper.timeouts.patience = 60.0  # a busy machine makes no job stuck
        self.steps = 0
        self.aimed_at: list[int] = []
        monkeypatch.setattr(module, "aim_at", self._aim)

    def _aim(self, ident: int, tell: Callable[[], None]) -> bool:
        is_free = aim_at(ident, tell)
        self.aimed_at.append(self.steps)
        return is_free

    def __call__(self) -> None:
        while True:
            shielded_step(0.01)
            self.steps += 1

    def check(self, error: BaseException | None) -> None:
        """The job was interrupted at the end of the step in which the timekeeper aimed at it."""
        assert isinstance(error, JobTimeout)
        assert self.steps <= self.aimed_at[0] + 1


@pytest.fixture
def fan_out(timekeeper: Timekeeper, monkeypatch: pytest.MonkeyPatch) -> FanOut:
    return FanOut(timekeeper, monkeypatch)


def test_a_job_that_is_always_in_a_store_step_is_interrupted(
    fan_out: FanOut, timekeeper: Timekeeper
) -> None:
    errors: list[BaseException | None] = []
    in_thread(lambda: errors.append(run_job(timekeeper, fan_out, 0.05)))
    fan_out.check(errors[0])
    assert timekeeper.stuck == []


@pytest.fixture
def alarm(timekeeper: Timekeeper) -> Iterator[None]:
    def on_alarm(number: int, frame: FrameType | None) -> None:
        timekeeper.alarms += 1
        timekeeper.timeouts.on_alarm(number, frame)

    before = signal.signal(signal.SIGALRM, on_alarm)
    timekeeper.timeouts.main = threading.get_ident()
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_such_a_job_is_interrupted_in_the_main_thread_too(
    fan_out: FanOut, timekeeper: Timekeeper
) -> None:
    fan_out.check(run_job(timekeeper, fan_out, 0.05))
    assert timekeeper.stuck == []


def test_a_step_that_outlasts_the_patience_is_stuck_and_ends_with_its_shield(
    timekeeper: Timekeeper,
) -> None:
    errors: list[BaseException | None] = []
    late: list[float] = []

    def job() -> None:
        step_until_stuck(timekeeper)
        late.append(time.monotonic())  # nothing of the job runs on behind the shield
        time.sleep(1.0)
        late.append(time.monotonic())

    in_thread(lambda: errors.append(run_job(timekeeper, job, 0.05)))
    assert [run.token for run in timekeeper.stuck] == [LEASE.token]
    assert isinstance(errors[0], JobTimeout)
    assert late == []
    assert timekeeper.looks < 40  # the shield is not polled
