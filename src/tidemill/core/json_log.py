"""Log records as JSON: one object on each line."""

from __future__ import annotations

import datetime as dt
import logging
from typing import Any

import msgspec

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
        """The record in one line."""
        when = dt.datetime.fromtimestamp(record.created).astimezone()
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _encodable(record.getMessage()),
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
            line["exception"] = _encodable(record.exc_text or self.formatException(record.exc_info))
        if record.stack_info:
            line["stack"] = _encodable(record.stack_info)
        return msgspec.json.encode(line).decode()


def _encodable(text: str) -> str:
    """The text without lone surrogates, which UTF-8 cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def _is_jsonable(name: str, value: Any) -> bool:
    try:
        msgspec.json.encode({name: value})
    except Exception:  # the value's own code may raise anything
        return False
    return True
