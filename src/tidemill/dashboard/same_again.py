"""The code that puts the same job again: a line of Python, and a request by curl."""

from __future__ import annotations

import keyword
import re
import shlex
from typing import Any

import msgspec

from tidemill.core.codec import unpack
from tidemill.core.envelope import Envelope, Ref
from tidemill.core.errors import CodecError, InvalidOption
from tidemill.core.job import GROUP, Record
from tidemill.core.priority import priority_of
from tidemill.dashboard.job_facts import call_of

_IMPORTS = {
    "datetime": "import datetime",
    "zoneinfo": "import zoneinfo",
    "Decimal": "from decimal import Decimal",
    "UUID": "from uuid import UUID",
    "inf": "from math import inf",
    "nan": "from math import nan",
}
"""The statements for the names in the ``repr`` of values that :func:`unpack` gives."""


def _call(envelope: Envelope) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a job that can be put again on its own.

    Raises:
        CodecError, InvalidOption: nobody can put the job again; the error says why.
    """
    if envelope.task == GROUP:
        raise InvalidOption(
            "this job stands for a group or a flow; enqueue the group or the flow again"
        )
    args, kwargs = call_of(envelope)
    if _has_results([args, kwargs]):
        raise InvalidOption(
            "an argument is the result of another job; only its flow can put this job"
        )
    return args, kwargs


def _has_results(value: Any) -> bool:
    """True when a value of a call has the result of another job in it."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Ref) or (
        isinstance(value, (list, tuple)) and any(map(_has_results, value))
    )


def as_python(record: Record) -> str:
    """One line of Python that puts the same job again, or a comment if no line can.

    The line imports the names that its arguments need.
    """
    envelope, priority = record.envelope, priority_of(record.rank)
    options = {
        "queue": "" if envelope.is_message else envelope.queue,
        "priority": priority if priority or record.rank != envelope.rank else None,
        "key": envelope.key,
        "tags": [] if envelope.is_message else list(envelope.tags),
    }
    given = [f"{name}={value!r}" for name, value in options.items() if value not in ("", None, [])]
    try:
        if envelope.is_message:
            values = repr(unpack(envelope.body) if envelope.body else None)
            line = f"mill.queue({envelope.queue!r}).put({', '.join([values, *given])})"
        else:
            args, kwargs = _call(envelope)
            parts = [*map(repr, args), *_named(kwargs)]
            values = ", ".join(parts)
            call = f"mill.call({', '.join([repr(envelope.task), *parts])})"
            line = f"mill.enqueue({call}.using({', '.join(given)}))"
    except (CodecError, InvalidOption, ValueError) as error:  # ValueError: an endless number
        return f"# {error}"
    imports = [_IMPORTS[name] for name in _IMPORTS if re.search(rf"\b{name}\b", values)]
    return "; ".join([*imports, line])


def _named(kwargs: dict[str, Any]) -> list[str]:
    if all(str(name).isidentifier() and not keyword.iskeyword(str(name)) for name in kwargs):
        return [f"{name}={value!r}" for name, value in kwargs.items()]
    return [f"**{kwargs!r}"]


def as_curl(record: Record, base: str) -> str:
    """The request that puts the same job through the job server at ``base``, or a comment."""
    envelope, priority = record.envelope, priority_of(record.rank)
    document: dict[str, Any]
    try:
        if envelope.is_message:
            document = {"queue": envelope.queue, "body": unpack(envelope.body)}
        else:
            args, kwargs = _call(envelope)
            document = {"task": envelope.task, "args": args, "kwargs": kwargs}
            document["queue"] = envelope.queue
        if priority or record.rank != envelope.rank:
            document["priority"] = priority
        text = msgspec.json.encode(document).decode()
        if msgspec.json.decode(text) != document:
            return "# JSON lacks a type of these arguments; use Python"
    except (CodecError, InvalidOption, TypeError, ValueError, OverflowError) as error:
        return f"# {error}"
    return f"curl --json {shlex.quote(text)} {shlex.quote(base + '/v1/jobs')}"
