"""Log lines of a worker process, whose filters and handlers are the app's own code.

A filter, a handler or a record factory may raise any exception. The exception must not end a thread
of the pool.
"""

from __future__ import annotations

import functools
import logging
import sys
from types import TracebackType
from typing import Any

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class SafeLog:
    """A logger that never raises. A line that logging refuses goes to stderr, with the reason."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)
        self.talks = self._log.isEnabledFor

    def log(self, level: int, line: str, *args: object, **options: Any) -> None:
        """As ``Logger.log``. The record names the caller as the source."""
        try:
            self._log.log(level, line, *args, stacklevel=2, **options)
        except BaseException as error:
            _print(line, args, error)

    debug = functools.partialmethod(log, logging.DEBUG)
    info = functools.partialmethod(log, logging.INFO)
    warning = functools.partialmethod(log, logging.WARNING)
    error = functools.partialmethod(log, logging.ERROR)
    exception = functools.partialmethod(log, logging.ERROR, exc_info=True)

    def failure(
        self,
        level: int,
        line: str,
        *args: object,
        exc_info: _ExcInfo | None = None,
        exc_text: str = "",
        stack: str | None = None,
    ) -> None:
        """Log a failed run with its exception, or with the stack that it is stuck in."""
        # Handlers take ``exc_text`` for the text of the exception.
        try:
            if self._log.isEnabledFor(level):
                frame = sys._getframe(1)
                code, where = frame.f_code, (frame.f_code.co_filename, frame.f_lineno)
                record = self._log.makeRecord(
                    self._log.name, level, *where, line, args, exc_info, code.co_name, sinfo=stack
                )
                record.exc_text = exc_text.rstrip() or None
                self._log.handle(record)
        except BaseException as error:
            _print(f"{line}%s", (*args, f"\n{exc_text or stack or ''}".rstrip()), error)


def _print(line: str, args: tuple[object, ...], error: BaseException) -> None:
    try:
        sys.stderr.write(f"{line % args}\n(the app's logging raised {type(error).__name__})\n")
    except BaseException:
        pass  # stderr is closed: drop the line
