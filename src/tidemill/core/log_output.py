"""The output of our processes' log records: our handler on stderr, or the handlers of the app.

The app's own logging takes precedence. While the app is imported, our handler is only on the logger
"tidemill". So the app finds a root logger without handlers. If the app gives the root logger a
handler, our handler is removed. If the app does not, our handler moves to the root logger.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from tidemill.core.config import storable

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


JOB_FIELDS = {
    "tidemill_job_id": "job_id",
    "tidemill_task": "task",
    "tidemill_queue": "queue",
    "tidemill_attempt": "attempt",
    "tidemill_trace_id": "trace_id",
    "tidemill_span_id": "span_id",
}
"""The attributes of a record that name the running job and its trace, and their names in JSON."""

_PLAIN = logging.LogRecord("", 0, "", 0, "", (), None)
_OWN = ("time", "level", "logger", "message", "pid", *JOB_FIELDS.values(), "exception", "stack")
_STANDARD = {*vars(_PLAIN), "message", "asctime", "taskName", *JOB_FIELDS}


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object.

    Extras that JSON cannot hold are left out. An extra with the name of another field gets an
    underscore at its end.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = dt.datetime.fromtimestamp(record.created).astimezone()
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": storable(record.getMessage()),
            "pid": record.process,
        }
        given = vars(record)
        for attribute, name in JOB_FIELDS.items():
            if given.get(attribute, "") != "":
                line[name] = given[attribute]
        for name, value in given.items():
            if name not in _STANDARD and _is_jsonable(name, value):
                line[f"{name}_" if name in _OWN else name] = value
        if record.exc_info:
            line["exception"] = storable(record.exc_text or self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = storable(record.stack_info)
        return msgspec.json.encode(line).decode()


def _is_jsonable(name: str, value: Any) -> bool:
    try:
        msgspec.json.encode({name: value})
    except Exception:  # the value's own code may raise anything
        return False
    return True
