"""Signal handlers that raise at every bytecode of locks, waits and batches."""

from __future__ import annotations

import contextlib
import contextvars
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bytecodes import SIGNAL, Alarm, At, raise_alarm

import tidemill
from tidemill import Tidemill
from tidemill.client.threads import Threads
from tidemill.core.locks import Condition, Event, Lock, LongLock
from tidemill.core.signals import InterruptibleWait, SignalsDeferred, raised_by_handler

ROOT = Path(tidemill.__file__).parent
ROOMS = {
    str(ROOT / f"{name}.py")
    for name in ("core/locks", "core/signals", "client/threads", "client/puts")
}
assert all(map(os.path.exists, ROOMS)), "a file has moved"
ROOMS.add(threading.__file__)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(SIGNAL, raise_alarm)
    yield
    signal.signal(SIGNAL, before)


def at_every_step(call: Callable[[], object], check: Callable[[], bool]) -> None:
    """Interrupt the call at each of its bytecodes; the check must hold after each."""
    step = 0
    while True:
        step += 1
        at = At(step, ROOMS.__contains__)
        try:
            with at:
                call()
        except Alarm:
            pass
        if at.left > 0:
            assert step > 20
            return
        assert in_a_thread(check), f"nobody can go on after {at.where}"


def in_a_thread(check: Callable[[], bool]) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(check()), daemon=True)
    thread.start()
    thread.join(60)
    return answers == [True]


@pytest.mark.parametrize("kind", [Lock, LongLock, Condition])
def test_no_lock_stays_taken(kind: type[Lock | LongLock | Condition]) -> None:
    lock = kind()

    def take() -> bool:
        with lock:
            return True

    at_every_step(take, take)


def test_no_lock_stays_taken_after_an_interrupted_wait() -> None:
    changed = Condition()

    def wait() -> None:
        with changed:
            changed.wait(0.001)

    def tell() -> bool:
        with changed:
            changed.notify_all()
        return True

    at_every_step(wait, tell)


def test_an_event_is_set_although_a_waiter_gave_up() -> None:
    event = Event()
    at_every_step(lambda: event.wait(0.001), lambda: not event.is_set())
    event.set()
    assert event.wait()


def test_threads_make_every_call_that_was_begun() -> None:
    threads = Threads("test", 2)

    def check() -> bool:
        made = threading.Event()
        threads.start(made.set)
        return made.wait(50)

    at_every_step(lambda: threads.start(lambda: None), check)
    threads.close()


def test_a_batch_whose_start_is_interrupted_takes_nothing_later() -> None:
    with Tidemill("memory://") as mill:

        def begin_and_end(at: At) -> bool:
            """Whether a batch is open afterwards."""
            with contextlib.suppress(Alarm), at, mill.batch():
                pass
            return mill.runtime.in_batch()

        step = 0
        while True:
            step += 1
            at = At(step, ROOMS.__contains__)
            is_open = contextvars.copy_context().run(begin_and_end, at)
            if at.left > 0:
                break
            # at the edges of a batch nothing can be done: see docs/laws.md
            if at.where[0] not in ("Batch.__enter__", "Batch.__exit__", "Batch._end"):
                assert not is_open, f"a batch is open after {at.where}"


def test_errors_of_signal_handlers_are_recognised() -> None:
    for begin in (SignalsDeferred, InterruptibleWait):
        with pytest.raises(Alarm) as found, begin():
            signal.raise_signal(SIGNAL)
        assert raised_by_handler(found.value)
    assert not raised_by_handler(TimeoutError())
