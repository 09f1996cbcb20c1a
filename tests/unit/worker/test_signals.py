"""Signals and wake-ups of a supervisor: two threads listen, and none is lost."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

import pytest

from tidemill.worker.signals import Signals


def readable(signals: Signals) -> list[int]:
    return select.select(signals.fds(), [], [], 0)[0]


def test_each_signal_is_taken_once() -> None:
    signals = Signals()
    for signum in (signal.SIGTERM, signal.SIGCHLD, signal.SIGTERM):
        signals.send(signum)
    assert readable(signals) == [signals.fileno()]
    assert signals.take() == [signal.SIGTERM, signal.SIGCHLD]
    assert signals.take() == []
    assert readable(signals) == []
    signals.close()


def test_the_watchdog_does_not_take_the_wake_up_of_the_other_thread() -> None:
    signals = Signals()
    signals.ring()
    signals.send(signal.SIGCHLD)
    # when: the watch takes the signals
    signals.take()
    # then: the supervisor's own thread still wakes up
    assert len(readable(signals)) == 1
    signals.heard()
    assert readable(signals) == []
    signals.close()


def test_a_signal_that_comes_with_its_handler_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a TERM that comes as soon as its handler is there
    install = signal.signal

    def install_and_send(signum: int, handler: Any) -> Any:
        before = install(signum, handler)
        if signum == signal.SIGTERM and callable(handler):
            os.kill(os.getpid(), signal.SIGTERM)
        return before

    monkeypatch.setattr(signal, "signal", install_and_send)
    signals = Signals()
    # when the signals are installed
    undo = signals.install()
    # then the TERM is there to be taken
    try:
        assert signals.take() == [signal.SIGTERM]
    finally:
        undo()
        signals.close()
