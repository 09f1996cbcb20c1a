"""Signal handlers that raise at every bytecode of locks, waits, batches, asynchronous puts."""

from __future__ import annotations

import asyncio
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
    for name in (
        *("core/locks", "core/signals"),
        *("client/threads", "client/put_batching", "client/batch"),
    )
}
ROOMS.add(threading.__file__)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before, interrupt = signal.signal(SIGNAL, raise_alarm), signal.getsignal(signal.SIGINT)
    yield
    signal.signal(SIGNAL, before)
    signal.signal(signal.SIGINT, interrupt)  # asyncio's own, if its runner was interrupted


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


def test_a_notification_of_an_interrupted_waiter_goes_to_another() -> None:
    main = threading.main_thread().ident or 0
    for _ in range(50):
        changed, here, there = Condition(), list[bool](), list[bool]()

        def other(changed: Condition = changed, there: list[bool] = there) -> None:
            with changed:
                there.append(changed.wait(10))

        def tell(changed: Condition = changed) -> None:
            while len(changed._turns) < 2:  # the main thread is the first, or the second
                os.sched_yield()
            with changed:
                changed.notify()
                signal.pthread_kill(main, SIGNAL)

        threads = [threading.Thread(target=each) for each in (other, tell)]
        with contextlib.suppress(Alarm), changed:
            for thread in threads:
                thread.start()
            here.append(changed.wait(10))
        if not here:
            threads[0].join(20)  # it ends once it was notified, or after 10 s
        with changed:
            changed.notify_all()
        for thread in threads:
            thread.join(10)
        assert here == [True] or there == [True]


def test_threads_make_every_call_that_was_begun() -> None:
    threads = Threads("test", 2)

    def check() -> bool:
        made = threading.Event()
        threads.start(made.set)
        return made.wait(50)

    at_every_step(lambda: threads.start(lambda: None), check)
    threads.close()


@pytest.mark.everyday
def test_an_asynchronous_put_follows_one_that_was_interrupted() -> None:
    with Tidemill("memory://") as mill:

        @mill.task
        def nothing() -> None:
            """Nothing to do."""

        async def put(seconds: float = 50) -> bool:
            return bool((await asyncio.wait_for(mill.aenqueue(nothing.call()), seconds)).id)

        loops: list[asyncio.AbstractEventLoop] = []

        def new_loop() -> asyncio.AbstractEventLoop:
            loops.append(asyncio.new_event_loop())
            return loops[-1]

        def interrupted() -> None:
            # an event loop only logs what a handler raises in a callback
            with contextlib.suppress(TimeoutError), asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(put(0.3))

        def follows() -> bool:
            while loops:  # the interruption may have come before the runner closed its loop
                loops.pop().close()
            return asyncio.run(put())

        at_every_step(interrupted, follows)


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
