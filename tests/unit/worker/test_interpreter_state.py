"""A job changes its interpreter, and the worker puts it back."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tidemill.worker.interpreter_state import InterpreterState


def _raising(*args: Any) -> Any:
    raise TimeoutError("a handler of the task")


@pytest.fixture
def interpreter() -> Iterator[InterpreterState]:
    before = signal.getsignal(signal.SIGALRM)
    yield InterpreterState()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_longer_switch_interval_and_a_lower_recursion_limit_are_put_back(
    interpreter: InterpreterState,
) -> None:
    interval, depth = sys.getswitchinterval(), sys.getrecursionlimit()
    sys.setswitchinterval(100)
    sys.setrecursionlimit(depth - 100)
    interpreter.after_job()
    assert sys.getswitchinterval() == interval
    assert sys.getrecursionlimit() == depth


def test_a_shorter_interval_of_a_store_step_is_left_alone() -> None:
    # given a thread that holds the lock of a store, which sets a short interval
    # when a job ends meanwhile
    # then the interval stays short
    code = """
import sys
from tidemill.worker.interpreter_state import InterpreterState
interpreter = InterpreterState()
sys.setswitchinterval(1e-5)
interpreter.after_job()
print(sys.getswitchinterval() < 1e-4)
"""
    # In a process of its own: threads of other tests set the interval of this one.
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "True\n"


def test_signal_handlers_and_timers_of_a_task_end_with_its_job(
    interpreter: InterpreterState,
) -> None:
    # given a worker's handler, and a task that replaced it and started a timer
    ours = signal.getsignal(signal.SIGALRM)
    interpreter.watch_signals()
    signal.signal(signal.SIGALRM, _raising)
    signal.setitimer(signal.ITIMER_REAL, 60)
    # when the job has ended
    interpreter.after_main_job()
    # then the timer is stopped and the handler is the worker's again
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == ours


def test_a_thread_starts_without_the_trace_functions_of_a_task(
    interpreter: InterpreterState,
) -> None:
    before = threading.gettrace()
    ran = threading.Event()
    threading.settrace(_raising)
    try:
        thread = interpreter.start(ran.set, (), "test")
    finally:
        threading.settrace(before)  # type: ignore[arg-type]
    thread.join()
    assert ran.is_set()
