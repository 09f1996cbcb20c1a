"""The search text for jobs: ``state:failed task:shop.pay -tag:test ended:1h``.

The list, the count, the bulk actions and the exports use the same parsed search. So a number always
agrees with the list that it links to. The store checks the conditions that a :class:`Filter` can
express. This module checks the other conditions, on records.

A job matches a field if it has any of the field's values, also when the search repeats the field.
For tags, headers and words, a job must have all given values. A minus before a token excludes the
jobs that match the token.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable

import msgspec

from tidemill.brokers.contract.inspection import Filter
from tidemill.core.errors import InvalidOption
from tidemill.core.fingerprint import failure_of
from tidemill.core.job import FINISHED, HIDDEN, Record, State
from tidemill.core.suggest import did_you_mean

LONGEST = 1000
"""The most characters of a search text."""

MOST = 25
"""The most tokens of a search text, and the most values of a token."""

FIELDS = {
    "state": "the state, as state:failed,expired; also state:unfinished and state:finished",
    "task": "the name of the task",
    "queue": "the queue",
    "tag": "one of the tags",
    "id": "the beginning of the id; id:*3f2a91c0 for its ending",
    "key": "the key",
    "args": "a part of the text that shows the arguments",
    "error": "a part of the latest error",
    "failure": "the fingerprint of the latest error",
    "ended": "the end, as ended:1h for the last hour, ended:>2d, ended:2026-01-31T09:00..10:30",
    "created": "the creation, as for ended:",
    "limit": "the name of the limit",
    "limitkey": "the key of the limit",
    "schedule": "the schedule that made the job",
    "worker": "the worker that runs or last ran the job",
    "group": "the id of the group, chain or flow",
    "header": "a header, as header:tenant=7",
}
"""The fields of a search, with their help texts."""

SECRET = frozenset({"args", "header", "key", "limitkey"})
"""Fields whose values may show arguments of jobs."""

_TOKEN = re.compile(r'(-?)(?:([a-z]+):)?((?:"(?:[^"\\]|\\.)*"|[^\s"])+)(?=\s|$)')
_PIECE = re.compile(r'"((?:[^"\\]|\\.)*)"|([^",]+)|(,)')
_ALL_OF = frozenset({"tag", "args", "header"})
_PUSHED = {"task": "task", "queue": "queue", "tag": "tag", "key": "key", "args": "text"}
_GROUPS = {"finished": FINISHED, "unfinished": frozenset(State) - FINISHED}
_SPAN = re.compile(r"([<>]?)(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

Check = Callable[[Record, str, float], bool]


class Condition(msgspec.Struct, frozen=True):
    """One token: a field and its values. A negated token excludes the jobs with these values."""

    field: str
    values: tuple[str, ...]
    negated: bool = False

    def __str__(self) -> str:
        values = ",".join(map(_quoted, self.values))
        return f"{'-' if self.negated else ''}{self.field}:{values}"


class JobQuery(msgspec.Struct, frozen=True):
    """A parsed search.

    Attributes:
        conditions: all tokens, in order.
        what: the filter that the store checks.
        rest: the conditions that the filter cannot express.
    """

    conditions: tuple[Condition, ...] = ()
    what: Filter = Filter()
    rest: tuple[Condition, ...] = ()

    def __str__(self) -> str:
        return " ".join(map(str, self.conditions))

    @property
    def is_empty(self) -> bool:
        """True when every job matches."""
        return not self.conditions

    @property
    def states(self) -> frozenset[State]:
        """The states that a matching job may have; empty for any state."""
        return self.what.states

    def values(self, field: str) -> tuple[str, ...]:
        """The values that a matching job may have in a field; empty for any value."""
        found = [c for c in self.conditions if c.field == field and not c.negated]
        return tuple(value for condition in found for value in condition.values)

    def matches_rest(self, record: Record, now: float) -> bool:
        """True when a record that passed the store's filter also meets the ``rest``.

        ``now`` is the wall time in seconds that relative times such as ``ended:1h`` count from.
        """
        return all(_holds(condition, record, now) for condition in self.rest)

    def matches(self, record: Record, now: float) -> bool:
        """True when a record meets all conditions."""
        return all(_holds(condition, record, now) for condition in self.conditions)

    def with_values(self, field: str, *values: str) -> JobQuery:
        """The same search with other values of a field; without values the field is left out."""
        kept = [c for c in self.conditions if c.field != field]
        return _query([*kept, Condition(field, values)] if values else kept)


def query_text(**fields: str | Iterable[str]) -> str:
    """The text of a search, as for a link: ``query_text(state="failed", queue="a b")``."""
    conditions = []
    for name, given in fields.items():
        values = (given,) if isinstance(given, str) else tuple(given)
        if any(values):
            conditions.append(Condition(name, tuple(map(str, values))))
    return " ".join(map(str, conditions))


def parse(text: str) -> JobQuery:
    """Parse a search text.

    Raises:
        InvalidOption: the text is too long, or a token cannot be used; the message names the token.
    """
    if len(text) > LONGEST:
        raise InvalidOption(f"the search has more than {LONGEST} characters; shorten it")
    conditions: list[Condition] = []
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        found = _TOKEN.match(text, at)
        if found is None:
            raise InvalidOption(
                f'{text[at : at + 40]!r} has a quote without its end; close it, or write \\"'
            )
        conditions.append(_condition(found))
        at = found.end()
        if len(conditions) > MOST:
            raise InvalidOption(f"the search has more than {MOST} tokens; leave some out")
    return _query(conditions)


def without_values(text: str) -> str:
    """A search text with the values of secret fields hidden, for users who may not see arguments.

    The text may be cut off, as in the audit list.
    """
    shown, at = list[str](), 0
    while rest := text[at:].lstrip():
        at = len(text) - len(rest)
        found = _TOKEN.match(text, at)
        if found is None:  # the text ends inside a quote
            name = rest.partition(":")[0].lstrip("-")
            return " ".join([*shown, f"{name}:{HIDDEN}" if name in FIELDS else HIDDEN])
        minus, field = found[1], found[2] or "args"
        shown.append(f"{minus}{field}:{HIDDEN}" if field in SECRET else found[0])
        at = found.end()
    return " ".join(shown)


def _condition(found: re.Match[str]) -> Condition:
    minus, field, rest = found.groups()
    if field is None:
        if ":" in rest and '"' not in rest:
            name = rest.partition(":")[0]
            if name in FIELDS:
                raise _no_value(name)
            raise InvalidOption(_unknown_field(name, rest))
        word = _unquoted(rest)
        if not word:
            raise InvalidOption('the search has an empty text ""; leave it out')
        return Condition("args", (word,), bool(minus))
    if field not in FIELDS:
        raise InvalidOption(_unknown_field(field, found[0]))
    values = (_unquoted(rest),) if field == "args" else tuple(_values(rest))
    if not all(values):
        raise _no_value(field)
    if len(values) > MOST:
        raise InvalidOption(f"{field}: has more than {MOST} values; leave some out")
    for value in values:
        _check(field, value)
    if field == "state":
        values = tuple(dict.fromkeys(state for value in values for state in _states(value)))
    return Condition(field, values, bool(minus))


def _no_value(field: str) -> InvalidOption:
    return InvalidOption(f"{field}: has no value; write {field}:VALUE, or leave it out")


def _unknown_field(name: str, token: str) -> str:
    near = did_you_mean(name, FIELDS)
    return (
        f"the search has no field {name[:40]!r}; {near or 'its fields are ' + ', '.join(FIELDS)}; "
        f'to search the arguments for this text, write "{token[:40]}" in quotes'
    )


def _values(text: str) -> list[str]:
    """The values of a token, which commas separate. A value may be in quotes."""
    values = [""]
    for quoted, plain, comma in _PIECE.findall(text):
        if comma:
            values.append("")
        else:
            values[-1] += plain or _unescaped(quoted)
    return values


def _unquoted(text: str) -> str:
    return "".join(plain or comma or _unescaped(q) for q, plain, comma in _PIECE.findall(text))


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def _quoted(value: str) -> str:
    if re.fullmatch(r'[^\s",\\]+', value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _states(value: str) -> list[str]:
    group = _GROUPS.get(value)
    return [str(state) for state in State if state in group] if group else [value]


def _check(field: str, value: str) -> None:
    """Refuse a value that no job can have."""
    if field == "state" and value not in {*State, *_GROUPS}:
        names = [*State, *_GROUPS]
        near = did_you_mean(value, names)
        raise InvalidOption(
            f"state:{value[:40]} is no state; {near or 'the states are ' + ', '.join(names)}"
        )
    if field in ("ended", "created"):
        span_of(field, value, 0.0)
    if field == "header" and "=" not in value:
        raise InvalidOption(f"header:{value[:40]} has no value; write header:NAME=VALUE")


# -- times ---------------------------------------------------------------------------------------


def span_of(field: str, value: str, now: float) -> tuple[float, float]:
    """The earliest and the latest time of a value in a time field, in epoch seconds.

    Raises:
        InvalidOption: the value is no time.
    """
    if found := _SPAN.fullmatch(value):
        moment = now - float(found[2]) * _UNITS[found[3]]
        return (0.0, moment) if found[1] == ">" else (moment, float("inf"))
    since, dots, until = value.partition("..")
    if dots:
        first = _moment(field, since, "") if since else 0.0
        return first, (_moment(field, until, since) if until else float("inf"))
    raise _no_time(field, value)


def _moment(field: str, text: str, before: str) -> float:
    """A moment in epoch seconds: a number, or an ISO time, in UTC unless it names an offset.

    A time without a date is on the day of the moment ``before``.
    """
    if re.fullmatch(r"\d{1,12}(\.\d{1,6})?", text, re.ASCII):
        return float(text)
    if "T" in before and re.fullmatch(r"\d\d:\d\d(:\d\d)?", text, re.ASCII):
        text = f"{before.partition('T')[0]}T{text}"
    try:
        moment = dt.datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()
    except (ValueError, OverflowError):
        raise _no_time(field, text) from None


def _no_time(field: str, value: str) -> InvalidOption:
    return InvalidOption(
        f"{field}:{value[:40]} is no time; write {field}:1h for the last hour, {field}:>1h for "
        f"earlier, or {field}:2026-01-31T09:00..2026-01-31T10:00"
    )


# -- the store's part and the rest ---------------------------------------------------------------


def _query(conditions: Iterable[Condition]) -> JobQuery:
    """The search with these conditions: as many as possible go into the store's filter."""
    merged = _merged(conditions)
    pushed: dict[str, str] = {}
    rest: list[Condition] = []
    states = frozenset(State)
    for condition in merged:
        field, values = condition.field, condition.values
        if field == "state":
            named = frozenset(map(State, values))
            states -= named if condition.negated else frozenset(State) - named
        elif condition.negated or len(values) != 1 or not _push(pushed, field, *values):
            rest.append(condition)
    if not states:  # no job can match, but a filter without states would find all jobs
        rest += [condition for condition in merged if condition.field == "state"]
    what = Filter(states=frozenset() if len(states) == len(State) else states)
    what = msgspec.structs.replace(what, **pushed)
    return JobQuery(tuple(merged), what, tuple(rest))


def _push(pushed: dict[str, str], field: str, value: str) -> bool:
    """Let the store check a condition; False when it cannot."""
    name = _PUSHED.get(field, "")
    if field == "id":
        name, value = ("id_suffix", value[1:]) if value.startswith("*") else ("id_prefix", value)
    elif field == "group":
        name, value = "id_prefix", f"{value}."
    if not name or name in pushed:
        return False
    pushed[name] = value
    return True


def _merged(conditions: Iterable[Condition]) -> list[Condition]:
    """One condition for each field, with all its values; one for each tag, header and word."""
    merged: dict[tuple[str, ...], Condition] = {}
    for c in conditions:
        if c.field in _ALL_OF:
            for value in c.values:
                merged[c.field, str(c.negated), value] = Condition(c.field, (value,), c.negated)
            continue
        place = c.field, str(c.negated)
        before = merged[place].values if place in merged else ()
        merged[place] = Condition(c.field, tuple(dict.fromkeys((*before, *c.values))), c.negated)
    return list(merged.values())


# -- checks on records ---------------------------------------------------------------------------


def _holds(condition: Condition, record: Record, now: float) -> bool:
    check = _CHECKS[condition.field]
    return any(check(record, value, now) for value in condition.values) != condition.negated


def _has_failure(record: Record, value: str, _: float) -> bool:
    last = record.attempts[-1] if record.attempts else None
    trace = last.traceback if last is not None and last.error else ""
    error = record.latest_error
    return bool(error) and failure_of(error, trace).fingerprint == value


def _has_id(record: Record, value: str, _: float) -> bool:
    job_id = record.envelope.id
    return job_id.endswith(value[1:]) if value.startswith("*") else job_id.startswith(value)


def _has_limit(record: Record, value: str, _: float) -> bool:
    return record.envelope.limit is not None and record.envelope.limit.name == value


def _has_limit_key(record: Record, value: str, _: float) -> bool:
    return record.envelope.limit is not None and record.envelope.limit.key == value


def _has_schedule(record: Record, value: str, _: float) -> bool:
    return record.envelope.planned is not None and record.envelope.planned.schedule == value


def _has_worker(record: Record, value: str, _: float) -> bool:
    last = record.attempts[-1].worker if record.attempts else ""
    return value in (record.worker or last)


def _has_header(record: Record, value: str, now: float) -> bool:
    name, _, expected = value.partition("=")
    return record.envelope.headers.get(name) == expected


def _is_within(field: str, moment: float, value: str, now: float) -> bool:
    since, until = span_of(field, value, now)
    return bool(moment) and since <= moment <= until


_CHECKS: dict[str, Check] = {
    "state": lambda record, value, _: record.state == value,
    "task": lambda record, value, _: record.envelope.task == value,
    "queue": lambda record, value, _: record.envelope.queue == value,
    "tag": lambda record, value, _: value in record.envelope.tags,
    "id": _has_id,
    "key": lambda record, value, _: record.envelope.key == value,
    "args": lambda record, value, _: value.lower() in record.envelope.text.lower(),
    "error": lambda record, value, _: value.lower() in record.latest_error.lower(),
    "failure": _has_failure,
    "ended": lambda record, value, now: _is_within("ended", record.finished, value, now),
    "created": lambda record, value, now: _is_within(
        "created", record.envelope.created, value, now
    ),
    "limit": _has_limit,
    "limitkey": _has_limit_key,
    "schedule": _has_schedule,
    "worker": _has_worker,
    "group": lambda record, value, _: record.envelope.id.startswith(f"{value}."),
    "header": _has_header,
}
