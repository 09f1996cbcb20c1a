"""Log lines of a worker process, whose filters and handlers are the app's own code.

A filter, a handler or a record factory may raise any exception. The exception must not end a thread
of the pool. SIGPIPE must not end the process, either, when a task has reset the signal and closed
stderr.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Any

from tidemill.core.signals import Unkilled

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]


class SafeLog:
    """A logger that never raises. A line that logging refuses goes to stderr, with the reason."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)

    def talks(self, level: int) -> bool:
        """True when lines of this level are wanted."""
        try:
            return self._log.isEnabledFor(level)
        except BaseException:
            return True

    def log(self, level: int, line: str, *args: object, **options: Any) -> None:
        """As ``Logger.log``."""
        self._write(level, line, args, **options)

    def _write(self, level: int, line: str, args: tuple[object, ...], **options: Any) -> None:
        """Log a line. Its record names the caller of the public method as the source."""
        try:
            with Unkilled():
                self._log.log(level, line, *args, stacklevel=3, **options)
        except BaseException as error:
            _print(line, args, error)

    def failure(
        self,
        level: int,
        line: str,
        *args: object,
        exc_info: _ExcInfo | None = None,
        exc_text: str = "",
        stack: str | None = None,
    ) -> None:
        """Log a failed run with its exception, or with the stack that it is stuck in.

        Handlers take ``exc_text`` for the text of the exception. Without a text, a handler formats
        the exception with the exception's own code, whatever its size.
        """
        try:
            if self._log.isEnabledFor(level):
                frame = sys._getframe(1)
                code, where = frame.f_code, (frame.f_code.co_filename, frame.f_lineno)
                record = self._log.makeRecord(
                    self._log.name, level, *where, line, args, exc_info, code.co_name, sinfo=stack
                )
                record.exc_text = exc_text.rstrip() or None
                with Unkilled():
                    self._log.handle(record)
        except BaseException as error:
            _print(f"{line}%s", (*args, f"\n{exc_text or stack or ''}".rstrip()), error)

    def debug(self, line: str, *args: object) -> None:
        """As ``Logger.debug``."""
        self._write(logging.DEBUG, line, args)

    def info(self, line: str, *args: object) -> None:
        """As ``Logger.info``."""
        self._write(logging.INFO, line, args)

    def warning(self, line: str, *args: object) -> None:
        """As ``Logger.warning``."""
        self._write(logging.WARNING, line, args)

    def error(self, line: str, *args: object) -> None:
        """As ``Logger.error``."""
        self._write(logging.ERROR, line, args)

    def exception(self, line: str, *args: object) -> None:
        """As ``Logger.exception``."""
        self._write(logging.ERROR, line, args, exc_info=True)


def _print(line: str, args: tuple[object, ...], error: BaseException) -> None:
    try:
        with Unkilled():
            sys.stderr.write(f"{line % args}\n(the app's logging raised {type(error).__name__})\n")
    except BaseException:
        pass  # stderr is closed: drop the line
