"""A job ends at the moment at which its timeout interrupts it."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from tidemill import State, Tidemill
from tidemill.worker.execute import Run
from tidemill.worker.timeouts import Timeouts


class _Loop:
    """The event loop of an async job that has ended."""

    def call_soon_threadsafe(self, function: Any) -> None:
        """The asyncio task is done, so the loop cancels nothing."""


class _Task:
    cancel = None


class _Running(dict[int, Run]):
    """Runs whose job ends between the removal of its run and the next step of the timekeeper."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.answers: list[bool] = []
        self.ends: list[threading.Thread] = []
        self._timeouts = timeouts

    def pop(self, token: int, default: Any = None) -> Any:
        run = super().pop(token, default)
        if run is not None and not self.ends:
            end = threading.Thread(target=lambda: self.answers.append(self._timeouts.finished(run)))
            self.ends.append(end)
            end.start()
            end.join(0.2)  # the end waits for the mark of the timekeeper, or does not
        return run


def test_an_async_job_that_ends_while_it_is_interrupted_is_not_stuck() -> None:
    timeouts = Timeouts(0.4)
    running = timeouts.running = _Running(timeouts)
    stub: Any = None
    run = Run(1, stub, stub, stub, stub, ident=1, started=0.0, deadline=1.0)
    run.asyncio_task, run.loop = cast(Any, _Task()), cast(Any, _Loop())
    timeouts.begin(run)
    assert timeouts.look(now=1.0) == []
    for end in running.ends:
        end.join()
    assert running.answers == [True]
    assert timeouts.look(now=10.0) == []
    assert timeouts.next_deadline() is None


def test_a_stuck_job_that_ends_at_last_is_not_logged_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Tidemill("memory://") as mill:
        ends, threads = threading.Event(), list[threading.Thread]()

        @mill.task(name="blocked", timeout=0.1, retries=0)
        def blocked() -> None:
            threads.append(threading.current_thread())
            ends.wait(60)

        job = blocked.enqueue()
        with mill.worker(2):
            while job.state is not State.FAILED:
                assert not ends.wait(0.01)
            ends.set()
            threads[0].join(60)
    lines = [one.getMessage() for one in caplog.records if "] failed" in one.getMessage()]
    assert len(lines) == 1, lines
