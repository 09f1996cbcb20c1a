"""The code that puts the same job again: a line of Python, and a request by curl."""

from __future__ import annotations

import datetime as dt
import decimal
import keyword
import math
import shlex
import uuid
import zoneinfo
from typing import Any

import msgspec

from tidemill.core.codec import unpack
from tidemill.core.envelope import Ref
from tidemill.core.errors import CodecError, InvalidOption
from tidemill.core.job import GROUP, Record
from tidemill.core.priority import priority_of
from tidemill.dashboard.job_facts import call_of

_STANDS = "# this job stands for a group or a flow; enqueue the group or the flow again"

_DATETIME = (dt.datetime, dt.date, dt.time, dt.timedelta)
_LONGEST = 10**600  # Python reads and writes longer numbers only in base 16


class _Python:
    """Python values as expressions, with the modules that the expressions need."""

    def __init__(self) -> None:
        self._modules: set[str] = set()

    @property
    def imports(self) -> str:
        """The statement before the expressions; empty when they need no module."""
        return f"import {', '.join(sorted(self._modules))}; " if self._modules else ""

    def of(self, value: Any) -> str:
        """The expression of a value that :func:`tidemill.core.codec.unpack` gives.

        Raises:
            InvalidOption: no expression gives the value.
        """
        kind = type(value)
        if kind is Ref:
            return _result(value)
        if kind in (list, tuple, set, frozenset):
            return self._collection(value)
        if kind is dict:
            items = (f"{self.of(name)}: {self.of(item)}" for name, item in value.items())
            return f"{{{', '.join(items)}}}"
        if kind is float and not math.isfinite(value):
            return f"float({str(value)!r})"
        if kind is int and abs(value) > _LONGEST:
            return hex(value)
        return self._scalar(value)

    def _collection(self, value: Any) -> str:
        items = ", ".join(map(self.of, value))
        if type(value) is list:
            return f"[{items}]"
        if type(value) is tuple:
            return f"({items},)" if len(value) == 1 else f"({items})"
        whole = f"{{{items}}}" if value else ""
        return whole if whole and type(value) is set else f"{type(value).__name__}({whole})"

    def _scalar(self, value: Any) -> str:
        if isinstance(value, _DATETIME):
            self._modules.add("datetime")
            if isinstance(getattr(value, "tzinfo", None), zoneinfo.ZoneInfo):
                self._modules.add("zoneinfo")
        if isinstance(value, (decimal.Decimal, uuid.UUID)):
            module = type(value).__module__
            self._modules.add(module)
            return f"{module}.{value!r}"
        return repr(value)


def _result(value: Ref) -> str:
    """The expression of the result of another job."""
    if value.group or value.ended:
        what = "end" if value.ended else "list of results"
        raise InvalidOption(
            f"an argument is the {what} of {value.ids[-1]}; only its flow can put this job"
        )
    return f"mill.job({value.ids[-1]!r}).result()"


def _has_results(value: Any) -> bool:
    """True when a value of a call has the result of another job in it."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Ref) or (
        isinstance(value, (list, tuple)) and any(map(_has_results, value))
    )


def as_python(record: Record) -> str:
    """One line of Python that puts the same job again, or a comment if no line can.

    The line imports the modules that its arguments need.
    """
    envelope, python = record.envelope, _Python()
    if envelope.task == GROUP:
        return _STANDS
    priority = priority_of(record.rank)
    options = {
        "priority": priority if priority or record.rank != envelope.rank else None,
        "key": envelope.key or None,
        "tags": list(envelope.tags) or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    try:
        if envelope.is_message:
            parts = [python.of(unpack(envelope.body)) if envelope.body else "None"]
            parts += [f"{name}={value!r}" for name, value in given.items() if name != "tags"]
            return f"{python.imports}mill.queue({envelope.queue!r}).put({', '.join(parts)})"
        args, kwargs = call_of(envelope)
        parts = [repr(envelope.task), *map(python.of, args)]
        spread = {name: value for name, value in kwargs.items() if not _is_name(name)}
        parts += [f"{name}={python.of(kwargs[name])}" for name in kwargs if name not in spread]
        parts += [f"**{python.of(spread)}"] if spread else []
    except (CodecError, InvalidOption) as error:
        return f"# {error}"
    given = {"queue": envelope.queue, **given}
    using = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{python.imports}mill.enqueue(mill.call({', '.join(parts)}).using({using}))"


def _is_name(name: Any) -> bool:
    """True for the name of an argument that code can write before ``=``."""
    return str(name).isidentifier() and not keyword.iskeyword(str(name))


def as_curl(record: Record, base: str) -> str:
    """The request that puts the same job through the job server at ``base``, or a comment."""
    envelope, priority = record.envelope, priority_of(record.rank)
    if envelope.task == GROUP:
        return _STANDS
    document: dict[str, Any] = {}
    try:
        if envelope.is_message:
            document = {"queue": envelope.queue, "body": unpack(envelope.body)}
        else:
            args, kwargs = call_of(envelope)
            if _has_results([args, kwargs]):
                return "# an argument is the result of another job; only its flow can put this job"
            document = {"task": envelope.task, "args": args, "kwargs": kwargs}
            document["queue"] = envelope.queue
        if priority or record.rank != envelope.rank:
            document["priority"] = priority
        text = msgspec.json.encode(document).decode()
        if msgspec.json.decode(text) != document:
            return "# JSON lacks a type of these arguments; use Python"
    except (CodecError, TypeError, ValueError, OverflowError) as error:
        return f"# {error}"
    return f"curl --json {shlex.quote(text)} {shlex.quote(base + '/v1/jobs')}"
