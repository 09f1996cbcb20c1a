"""No signal to a supervisor is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tidemill.core.signals import Signals


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
