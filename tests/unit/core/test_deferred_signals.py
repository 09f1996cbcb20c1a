"""Ctrl-C at any step of a put leaves the store to the others, and is not lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from bytecodes import At
from lmdb_desk import Gate, ids, in_threads, job, join

from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine import group_commit
from tidemill.core import signals

ROOMS = (group_commit.__file__, signals.__file__)
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


@pytest.mark.parametrize("number", SIGNALS)
def test_no_interrupted_put_keeps_the_lead(
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
            interrupted = At(at, ROOMS.__contains__, number)
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


def test_a_wait_for_others_is_interrupted_at_once(broker: LmdbBroker, handlers: list[Any]) -> None:
    gate, noticed = Gate(broker._store), threading.Event()

    def raising(number: int, frame: FrameType | None) -> None:
        if not noticed.is_set():
            noticed.set()
            raise Stopped

    def press() -> None:
        while not broker._store.commits.pending:
            os.sched_yield()
        # Python sees a signal that comes just before the thread blocks only after the next one.
        while not noticed.wait(0.5):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    signal.signal(signal.SIGTERM, raising)
    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(Stopped):
        broker.put([job(id="gone")])  # the gate is closed all the while
    presser.join(10)
    gate.release_when(0)
    assert ids(broker) == set()
    assert broker.put([job(id="kept")])


def test_all_signals_that_came_before_a_wait_are_handled_in_it(handlers: list[Any]) -> None:
    seen: list[int] = []

    def noted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if number == signal.SIGINT:
            signal.raise_signal(signal.SIGHUP)  # comes while a handler runs

    before = signal.signal(signal.SIGHUP, noted)
    for number in SIGNALS:
        signal.signal(number, noted)
    with signals.SignalsDeferred():
        for number in SIGNALS:
            signal.raise_signal(number)
        assert seen == []
        signals.begin_interruptible_wait()
        in_the_wait = list(seen)
        signals.end_interruptible_wait()
    signal.signal(signal.SIGHUP, before)
    assert in_the_wait == seen == [*SIGNALS, signal.SIGHUP]


def test_a_section_replaces_only_handlers_that_do_something(handlers: list[Any]) -> None:
    signal.signal(signal.SIGINT, signals.do_nothing)
    with signals.SignalsDeferred():
        assert signal.getsignal(signal.SIGINT) is signals.do_nothing
        assert signal.getsignal(signal.SIGTERM) not in handlers
    assert signal.getsignal(signal.SIGTERM) in handlers
