"""A signal at a chosen bytecode of the main thread."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNAL = signal.SIGALRM


class Alarm(BaseException):
    """A timeout by ``signal.alarm`` raises this."""


def raise_alarm(*_: object) -> None:
    """Raise ``Alarm``: a handler of signals."""
    raise Alarm


class At:
    """Sends a signal at the n-th bytecode that the main thread runs in the chosen files.

    Attributes:
        left: bytecodes until the signal; 0 or less once it was sent.
        where: function and line at which the signal was sent.
    """

    def __init__(self, step: int, chosen: Callable[[str], bool], number: int = SIGNAL) -> None:
        self.left = step
        self.where: Any = None
        self._chosen = chosen
        self._number = number

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Count the bytecodes of a frame."""
        if not self._chosen(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if not self.left:
                self.where = frame.f_code.co_qualname, frame.f_lineno
                signal.raise_signal(self._number)
        return self.trace

    def __enter__(self) -> At:
        sys._getframe().f_trace_opcodes = True  # 3.12 traces none that was not asked for before
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
