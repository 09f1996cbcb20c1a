"""Ctrl-C at any step of a put leaves the store to the others, and is not lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from lmdb_desk import Gate, ids, in_threads, job, join

from tidemill import deferral
from tidemill.brokers.lmdb import commit
from tidemill.brokers.lmdb.broker import LmdbBroker

ROOMS = (commit.__file__, deferral.__file__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """What a program's own handler of SIGTERM may raise."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


@pytest.fixture
def handlers() -> Iterator[list[Any]]:
    before = [signal.getsignal(number) for number in SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    yield [signal.default_int_handler, stop]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


class Interrupted:
    """Sends this process a signal at the n-th step of what the commit does in the main thread."""

    def __init__(self, number: int, at: int) -> None:
        self.number = number
        self.left = at

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in ROOMS:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if not self.left:
                signal.raise_signal(self.number)
        return self.trace

    def __enter__(self) -> Interrupted:
        sys._getframe().f_trace_opcodes = True  # 3.12 traces none that was not asked for before
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


@pytest.mark.parametrize("number", SIGNALS)
def test_at_no_step_of_a_put_is_the_lead_left_with_who_is_gone(
    broker: LmdbBroker, handlers: list[Any], number: int
) -> None:
    over = threading.Event()

    def others() -> None:
        while not over.is_set():
            broker.put([job()])

    threads, answers = in_threads([others] * 2)
    at = 0
    try:
        while True:
            at += 1
            interrupted = Interrupted(number, at)
            seen = False
            try:
                with interrupted:
                    broker.put([job()])
            except (KeyboardInterrupt, Stopped):
                seen = True
            if interrupted.left > 0:  # there are no more steps
                break
            assert seen, f"the signal at step {at} is lost"
            for each, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Stopped)):
                with pytest.raises(error):  # as before, and at once
                    signal.raise_signal(each)
            free, answer = in_threads([lambda: broker.put([job()])])
            join(free)
            assert isinstance(answer[0], list), f"nobody can write after a signal at step {at}"
    finally:
        over.set()
        join(threads)
    assert answers == [None, None]
    assert at > 100


class Presser:
    """Sends signals to the main thread once that waits, each until it is noticed.

    A signal that comes just before the thread blocks is seen by Python only after the next one.
    """

    def __init__(self, broker: LmdbBroker, number: int, times: int) -> None:
        self.noticed = [threading.Event() for _ in range(times)]
        self._pending = broker._store.commits.pending
        self._number = number
        self.thread = threading.Thread(target=self._press)
        self.thread.start()

    def _press(self) -> None:
        while not self._pending:
            os.sched_yield()
        for noticed in self.noticed:
            signal.pthread_kill(threading.main_thread().ident or 0, self._number)
            while not noticed.wait(0.5):
                signal.pthread_kill(threading.main_thread().ident or 0, self._number)

    def notice(self) -> bool:
        """In the handler; True for the last."""
        left = [event for event in self.noticed if not event.is_set()]
        if left:
            left[0].set()
        return len(left) <= 1


def test_a_wait_for_others_is_interrupted_at_once(broker: LmdbBroker, handlers: list[Any]) -> None:
    gate = Gate(broker._store)
    presser = Presser(broker, signal.SIGTERM, 1)

    def raising(number: int, frame: FrameType | None) -> None:
        presser.notice()
        raise Stopped

    signal.signal(signal.SIGTERM, raising)
    with pytest.raises(Stopped):
        broker.put([job(id="gone")])  # the gate is closed all the while
    presser.thread.join(10)
    gate.release_when(0)
    assert ids(broker) == set()
    assert broker.put([job(id="kept")])


def test_a_handler_that_raises_nothing_does_not_end_the_wait(
    broker: LmdbBroker, handlers: list[Any]
) -> None:
    gate = Gate(broker._store)
    presser = Presser(broker, signal.SIGTERM, 2)

    def noted(number: int, frame: FrameType | None) -> None:
        if presser.notice():
            gate.open.set()

    signal.signal(signal.SIGTERM, noted)
    assert broker.put([job(id="kept")])
    presser.thread.join(10)
    gate.thread.join(10)
    assert all(event.is_set() for event in presser.noticed)
    assert signal.getsignal(signal.SIGTERM) is noted
