"""Log lines of a worker process, whose filters and handlers are the app's own code.

A filter, a handler or a record factory may raise anything. That must end no thread of the pool.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

__all__ = ["SafeLog"]


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
        try:
            self._log.log(level, line, *args, stacklevel=3, **options)
        except BaseException as error:
            _print(line, args, error)

    def debug(self, line: str, *args: object) -> None:
        """As ``Logger.debug``."""
        self.log(logging.DEBUG, line, *args)

    def info(self, line: str, *args: object) -> None:
        """As ``Logger.info``."""
        self.log(logging.INFO, line, *args)

    def warning(self, line: str, *args: object) -> None:
        """As ``Logger.warning``."""
        self.log(logging.WARNING, line, *args)

    def error(self, line: str, *args: object) -> None:
        """As ``Logger.error``."""
        self.log(logging.ERROR, line, *args)

    def exception(self, line: str, *args: object) -> None:
        """As ``Logger.exception``."""
        self.log(logging.ERROR, line, *args, exc_info=True)


def _print(line: str, args: tuple[object, ...], error: BaseException) -> None:
    try:
        sys.stderr.write(f"{line % args}\n(the app's logging raised {type(error).__name__})\n")
    except BaseException:
        pass  # nobody can be told
