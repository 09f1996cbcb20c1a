"""A sampling profile of this process: the stacks of its jobs, read many times a second.

While a profile is made, a separate thread looks at the frames of all threads
(``sys._current_frames``). Samples count wall time: a job that waits counts as much as a job that
computes. A C call that keeps the interpreter lock also stops the sampling. Only the sample after
the call shows the call.

A stack begins at the function of the task. Threads that a task has started appear under their
names. Threads of tidemill that run no job do not appear.
"""

from __future__ import annotations

import collections
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType

Stacks = dict[str, int]
"""Collapsed stacks: the functions from the outermost on, joined by ``;``, with their samples."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RUNS = os.path.join(_PACKAGE, "worker", "execute.py")
_DEEPEST = 200  # the most frames of a stack
_DIFFERENT = 20_000  # different stacks of one profile; further stacks are counted together
_TOO_MANY = "(more different stacks)"

_Key = tuple[str, tuple[CodeType, ...]]


class Sampler(threading.Thread):
    """Takes samples for some seconds, then calls ``done`` with the stacks and the number of
    samples."""

    def __init__(self, seconds: float, hertz: float, done: Callable[[Stacks, int], None]) -> None:
        super().__init__(name="tidemill-sampler", daemon=True)
        self._seconds = seconds
        self._every = 1 / hertz
        self._done = done
        self._counts: collections.Counter[_Key] = collections.Counter()

    def run(self) -> None:
        pause, began, samples = threading.Event(), time.monotonic(), 0
        while (spent := time.monotonic() - began) < self._seconds:
            self._sample()
            samples += 1
            pause.wait(max(0.0, samples * self._every - spent))
        self._done(self._collapsed(), samples)

    def _sample(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            key = _key(names.get(ident, ""), frame)
            if key is not None:
                full = len(self._counts) >= _DIFFERENT and key not in self._counts
                self._counts[(_TOO_MANY, ()) if full else key] += 1

    def _collapsed(self) -> Stacks:
        """The stacks as texts, with the sum of the samples of each text."""
        found: Stacks = {}
        labels: dict[CodeType, str] = {}
        for (name, codes), count in self._counts.items():
            for code in codes:
                if code not in labels:
                    labels[code] = _label(code)
            text = ";".join([*([name] if name else []), *(labels[code] for code in codes)])
            found[text] = found.get(text, 0) + count
        return found


def _key(name: str, frame: FrameType | None) -> _Key | None:
    """The stack of a thread from the task's function on; None for a thread without a job."""
    codes: list[CodeType] = []
    while frame is not None and len(codes) < _DEEPEST:
        codes.append(frame.f_code)
        frame = frame.f_back
    codes.reverse()
    first = next((n for n, code in enumerate(codes) if code.co_filename == _RUNS), None)
    if first is None:
        if not name or name == "MainThread" or name.startswith("tidemill"):
            return None
        return f"thread {re.sub('[0-9]+', 'N', _clean(name))}", tuple(codes)
    while first < len(codes) and codes[first].co_filename.startswith(_PACKAGE):
        first += 1
    return ("", tuple(codes[first:])) if first < len(codes) else None


def _label(code: CodeType) -> str:
    """A function as ``name (file:line)``, with the last two parts of the file's path."""
    file = "/".join(code.co_filename.split(os.sep)[-2:])
    return _clean(f"{code.co_qualname} ({file}:{code.co_firstlineno})")


def _clean(text: str) -> str:
    """A text without the separators of collapsed stacks."""
    return text.replace(";", ",").replace("\n", " ")
