"""The output of our processes' log records: our handler on stderr, or the handlers of the app.

The app's own logging takes precedence. While the app is imported, our handler is only on the logger
"tidemill". So the app finds a root logger without handlers. If the app gives the root logger a
handler, our handler is removed. If the app does not, our handler moves to the root logger.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import msgspec

from tidemill.core.json_log import JsonFormatter

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error", "critical")

_TEXT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
_LEVEL, _FORMAT = "TIDEMILL_LOG", "TIDEMILL_LOG_FORMAT"


class LogSettings(msgspec.Struct, frozen=True):
    """The level that the user has set (empty without a level), and the format of our handler."""

    level: str = ""
    format: str = "text"

    @classmethod
    def from_environment(cls) -> LogSettings:
        """The settings that the parent process or the user has put into the environment."""
        level, form = os.environ.get(_LEVEL, "").lower(), os.environ.get(_FORMAT, "").lower()
        return cls(level if level in LEVELS else "", form if form in FORMATS else "text")

    def export(self) -> None:
        """Put the settings into the environment, for the processes that this process starts."""
        os.environ[_FORMAT] = self.format
        if self.level:
            os.environ[_LEVEL] = self.level

    @property
    def number(self) -> int:
        """The level as a number; INFO when the user has set no level."""
        return int(getattr(logging, self.level.upper() or "INFO"))


@contextlib.contextmanager
def log_output(settings: LogSettings) -> Iterator[None]:
    """Set up the logging of this process around the import of the app."""
    ours, root = logging.getLogger("tidemill"), logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else logging.Formatter(_TEXT))
    ours.addHandler(handler)
    if settings.level:
        ours.setLevel(settings.number)
    try:
        yield
    finally:
        _enable_loggers()
        ours.removeHandler(handler)
        if not root.handlers:
            root.addHandler(handler)
            if settings.level or root.level == logging.WARNING:
                root.setLevel(settings.number)
        if settings.level:
            ours.setLevel(settings.number)  # the app may have set another level


def _enable_loggers() -> None:
    """Enable our loggers again: by default ``dictConfig`` disables all loggers that exist."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and f"{name}.".startswith("tidemill."):
            logger.disabled = False
