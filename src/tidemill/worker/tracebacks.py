"""Tracebacks as text, however large an exception is.

Python formats the whole message of an exception. A message of 80 MB with many line ends would hold
the interpreter lock for minutes. So messages and notes are cut before they are formatted.
"""

from __future__ import annotations

from collections.abc import Iterator
from traceback import TracebackException, format_tb
from types import TracebackType
from typing import Any

TRACEBACK_MOST = 16_000
"""Characters that are kept from the end of a traceback."""

PART_MOST = 2_000
"""Characters that are kept of each message and each note."""

NOTES_MOST = 20
LINKS_MOST = 100
"""At most this many notes of an exception, and this many linked exceptions, are formatted."""


def format_traceback(error: BaseException, trace: TracebackType | None) -> str:
    """The traceback of an exception and its causes, cut to ``TRACEBACK_MOST`` characters.

    The exception's own code, which runs here, may raise any exception.
    """
    try:
        whole = TracebackException(type(error), error, trace)
        if not hasattr(whole, "_str"):  # another Python may lack this private part
            text = f"{type(error).__qualname__}: {str(error)[:PART_MOST]}\n"
            return "".join((*format_tb(trace), text))[-TRACEBACK_MOST:]
        for number, part in enumerate(_parts(whole)):
            _shorten(part, last=number >= LINKS_MOST)
        return "".join(whole.format())[-TRACEBACK_MOST:]
    except BaseException:
        return "".join(format_tb(trace))[-TRACEBACK_MOST:]


def _parts(whole: TracebackException) -> Iterator[TracebackException]:
    """The exception and all exceptions linked to it, each one before its own links."""
    waiting = [whole]
    while waiting:
        part = waiting.pop(0)
        yield part
        links = [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]
        waiting += [link for link in links if link is not None]


def _shorten(part: Any, *, last: bool) -> None:
    """Cut the message and notes of an exception; with ``last`` drop its links, too."""
    if isinstance(part._str, str):
        part._str = part._str[:PART_MOST]
    notes = getattr(part, "__notes__", None)
    if isinstance(notes, str):
        part.__notes__ = notes[:PART_MOST]
    elif isinstance(notes, (list, tuple)):
        kept = list(notes[:NOTES_MOST])
        part.__notes__ = [note[:PART_MOST] if isinstance(note, str) else note for note in kept]
    if last:
        part.__cause__ = part.__context__ = None
        if getattr(part, "exceptions", None):
            part.exceptions = []
