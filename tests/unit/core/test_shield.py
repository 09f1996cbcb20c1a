"""No exception for a job lands inside a shielded stretch, whoever is faster (law 8)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from tidemill.client.context import JobContext
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease
from tidemill.core.retry import JobTimeout
from tidemill.core.shield import aim, lower_shield, raise_shield, take_off
from tidemill.worker import timeouts as module
from tidemill.worker.execute import Run
from tidemill.worker.timeouts import Timeouts

LEASE = Lease(1, 1, 0, 0, 0, 0.0, 0.0, 0.0, b"")


def run_here() -> Run:
    """A run in this thread; its task is of no account here."""
    envelope, task = Envelope(id="j"), cast(Any, None)
    context = JobContext(envelope, 1)
    return Run(LEASE.token, LEASE, envelope, task, context, threading.get_ident(), 0.0)


def may_interrupt(ident: int) -> bool:
    """Whether no shield of the thread is left."""
    try:
        return aim(ident)
    finally:
        take_off(ident)


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
    assert not aim(ident)
    take_off(ident)
    lower_shield()
    assert aim(ident)
    take_off(ident)


def test_a_step_does_not_begin_between_the_look_and_the_shot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timekeeper sees no shield; a store step begins before the exception is sent."""
    step, landed, timeouts = threading.Event(), [], Timeouts(patience=0.4)
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
    assert victim.run is not None
    victim.run.wanted = JobTimeout
    timeouts.look(time.monotonic())
    victim.join()
    assert isinstance(victim.error, JobTimeout)
    assert landed == []
    assert may_interrupt(victim.run.ident)


def test_a_thread_goes_on_after_an_aim_is_removed() -> None:
    ready, idents = threading.Event(), []

    def work() -> None:
        idents.append(threading.get_ident())
        ready.set()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            raise_shield()
            lower_shield()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    while thread.is_alive():
        aim(idents[0])
        take_off(idents[0])
    thread.join()
    assert may_interrupt(idents[0])


@pytest.fixture
def fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("fast_switching")
def test_a_hundred_shots_hit_nothing_shielded() -> None:
    timeouts = Timeouts(patience=0.4)
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
        run.wanted = JobTimeout
        while timeouts.running:
            timeouts.look(time.monotonic())
        victim.join()
        assert isinstance(victim.error, JobTimeout)
        assert may_interrupt(run.ident)
        timeouts.finished(run)
    assert wrong == []
