"""A job in the main thread sets signal handlers, and the worker puts its own back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tidemill.worker.execute import TaskSignals


def _raising(*args: Any) -> Any:
    raise TimeoutError("a handler of the task")


@pytest.fixture
def handlers() -> Iterator[None]:
    before = signal.getsignal(signal.SIGALRM)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("handlers")
def test_signal_handlers_and_timers_of_a_task_end_with_its_job() -> None:
    # given a worker's handler, and a task that replaced it and started a timer
    ours = signal.getsignal(signal.SIGALRM)
    signals = TaskSignals()
    signal.signal(signal.SIGALRM, _raising)
    signal.setitimer(signal.ITIMER_REAL, 60)
    # when the job has ended
    signals.put_back()
    # then the timer is stopped and the handler is the worker's again
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == ours
