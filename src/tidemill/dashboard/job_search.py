"""The search text for jobs: ``state:failed task:shop.pay order 17``.

The list, the count, the bulk actions and the exports use the same parsed search. So a number always
agrees with the list that it links to. The store checks the conditions by its :class:`Filter`. Only
the fingerprint of a failure is compared here, on records: the page Failed needs it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.inspection import Filter, Page, QueueStats, is_own
from tidemill.core.fingerprint import Failure, failure_of
from tidemill.core.job import FINISHED, HIDDEN, Record, State
from tidemill.core.suggest import did_you_mean
from tidemill.errors import InvalidOption

LONGEST = 1000  # the most characters of a search text
FIELDS = {  # the fields of a search, with their help texts
    "state": "the state, as state:failed,expired; also state:unfinished and state:finished",
    "task": "the name of the task",
    "queue": "the queue",
    "tag": "one of the tags",
    "id": "the beginning of the id; id:*3f2a91c0 for its ending",
    "key": "the key",
    "args": "a part of the text that shows the arguments",
    "failure": "the fingerprint of the latest error",
    "group": "the id of the group, chain or flow",
}

SECRET = frozenset({"args", "key"})  # fields whose values may show arguments of jobs
_TOKEN = re.compile(r'(?:([a-z]+):)?((?:"(?:[^"\\]|\\.)*"|[^\s"])+)(?=\s|$)')
_PIECE = re.compile(r'"((?:[^"\\]|\\.)*)"|([^"]+)')
_PUSHED = {"args": "text", "group": "id_prefix"}
_GROUPS = {"finished": FINISHED, "unfinished": frozenset(State) - FINISHED}


class JobQuery(msgspec.Struct, frozen=True):
    """A parsed search: the fields with their values, and the filter that the store checks."""

    tokens: dict[str, str] = {}
    what: Filter = Filter()

    def __str__(self) -> str:
        return query_text(**self.tokens)

    @property
    def is_empty(self) -> bool:
        """True when every job matches."""
        return self.what == Filter() and not self.failure

    @property
    def states(self) -> frozenset[State]:
        """The states that a matching job may have; empty for any state."""
        return self.what.states

    @property
    def failure(self) -> str:
        """The fingerprint that the latest error of a matching job has; empty for any."""
        return self.tokens.get("failure", "")

    def matches_rest(self, record: Record) -> bool:
        """True when a record that passed the store's filter has the failure of the search."""
        if not self.failure:
            return True
        return bool(record.latest_error) and failure_in(record).fingerprint == self.failure

    def with_value(self, field: str, value: str = "") -> JobQuery:
        """The same search with another value of a field; without a value the field is left out."""
        kept = {name: one for name, one in self.tokens.items() if name != field}
        return _query(kept | ({field: value} if value else {}))


def failure_in(record: Record) -> Failure:
    last = record.attempts[-1] if record.attempts else None
    return failure_of(record.latest_error, last.traceback if last and last.error else "")


def query_text(**fields: str) -> str:
    """The text of a search, as for a link: ``query_text(state="failed", queue="a b")``."""
    return " ".join(f"{name}:{_quoted(value)}" for name, value in fields.items() if value)


def parse(text: str) -> JobQuery:
    """Parse a search text. The words without a field are one part of the arguments."""
    if len(text) > LONGEST:
        raise InvalidOption(f"the search has more than {LONGEST} characters; shorten it")
    tokens: dict[str, str] = {}
    for field, value in _pairs(text):
        if field == "args":
            tokens["args"] = " ".join(filter(None, (tokens.get("args"), value)))
        elif field in tokens:
            raise InvalidOption(f"the search has {field}: twice; keep one of the two")
        else:
            tokens[field] = value
    return _query(tokens)


def without_values(text: str) -> str:
    """A search text, perhaps cut off, with the values of secret fields hidden."""
    shown, at = list[str](), 0
    while rest := text[at:].lstrip():
        at = len(text) - len(rest)
        found = _TOKEN.match(text, at)
        if found is None:  # the text ends inside a quote
            name = rest.partition(":")[0]
            return " ".join([*shown, f"{name}:{HIDDEN}" if name in FIELDS else HIDDEN])
        field = found[1] or "args"
        shown.append(f"{field}:{HIDDEN}" if field in SECRET else found[0])
        at = found.end()
    return " ".join(shown)


def _pairs(text: str) -> Iterable[tuple[str, str]]:
    """The tokens of a text, each with its field and its value."""
    at = 0
    while rest := text[at:].lstrip():
        at = len(text) - len(rest)
        found = _TOKEN.match(text, at)
        if found is None:
            raise InvalidOption(
                f'{rest[:40]!r} has a quote without its end; close it, or write \\"'
            )
        at = found.end()
        field, value = found[1], _unquoted(found[2])
        if field is None and ":" in found[2] and '"' not in found[2]:
            field, _, value = value.partition(":")
        if field is not None and field not in FIELDS:
            raise InvalidOption(
                f"the search has no field {field[:40]!r}; its fields are {', '.join(FIELDS)}; "
                f'to search the arguments for this text, write "{found[0][:40]}" in quotes'
            )
        if not value.strip("*" if field == "id" else "," if field == "state" else ""):
            raise InvalidOption(f"{field or 'args'}: has no value; write a value, or leave it out")
        yield field or "args", value


def _unquoted(text: str) -> str:
    return "".join(plain or re.sub(r"\\(.)", r"\1", q) for q, plain in _PIECE.findall(text))


def _quoted(value: str) -> str:
    if re.fullmatch(r'[^\s"\\]+', value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _query(tokens: dict[str, str]) -> JobQuery:
    """The search with these conditions, and the store's filter for them."""
    pushed: dict[str, str] = {}
    for field, value in tokens.items():
        name = _PUSHED.get(field, field)
        if field == "id":
            name = "id_suffix" if value.startswith("*") else "id_prefix"
        if name in pushed:
            raise InvalidOption("the search has both id: and group:; keep one of the two")
        pushed[name] = (
            f"{value}." if field == "group" else value.removeprefix("*" * (field == "id"))
        )
    pushed.pop("failure", None)
    states = _states(pushed.pop("state", ""))
    return JobQuery(tokens, msgspec.structs.replace(Filter(states=states), **pushed))


def _states(value: str) -> frozenset[State]:
    states: frozenset[State] = frozenset()
    for name in filter(None, value.split(",")):
        if name not in {*State, *_GROUPS}:
            names = [*State, *_GROUPS]
            near = did_you_mean(name, names) or f"the states are {', '.join(names)}"
            raise InvalidOption(f"state:{name[:40]} is no state; {near}")
        states |= _GROUPS.get(name) or {State(name)}
    return states


LOOK = 2500  # the most jobs that the store checks in one read of a search with conditions
_BATCH = 200  # records that one read gets when the store checks only a part of the search
PATIENCE = 0.08  # seconds after which a page ends, even if it is not full


class Listed(msgspec.Struct, frozen=True):
    """A page of jobs, newest first."""

    records: list[Record]
    cursor: str  # where the next page begins; empty at the end
    is_full: bool  # False when the page ended early, because its time was over


class Count(msgspec.Struct, frozen=True):
    """How many jobs match."""

    number: int
    is_exact: bool = True  # False when more jobs may match, because counting took too long


def page_of(mill: Tidemill, query: JobQuery, limit: int = 50, cursor: str = "") -> Listed:
    """A page of the jobs that match. Raises InvalidOption for a wrong cursor, or FeatureMissing."""
    until = time.monotonic() + PATIENCE
    found: list[Record] = []
    while True:
        page, matching = _read(mill, query, limit - len(found), cursor)
        found += matching
        cursor = page.cursor
        if not cursor or len(found) >= limit:
            return Listed(found, cursor, is_full=True)
        if time.monotonic() >= until:
            return Listed(found, cursor, is_full=False)


def _read(mill: Tidemill, query: JobQuery, want: int, cursor: str) -> tuple[Page, list[Record]]:
    """One read: a page of the store, and at most ``want`` of its records that match."""
    what = query.what
    if what != Filter():
        what = msgspec.structs.replace(what, look=LOOK)
    most = max(want, _BATCH) if query.failure else want
    page = mill.jobs(what).page(limit=most, cursor=cursor)
    places = [n for n, record in enumerate(page.records) if query.matches_rest(record)]
    if len(places) > want:
        page = mill.jobs(what).page(limit=places[want - 1] + 1, cursor=cursor)
    return page, [record for record in page.records if query.matches_rest(record)][:want]


def pages_of(
    mill: Tidemill, query: JobQuery, cursor: str = "", size: int = 500
) -> Iterator[tuple[list[Record], str]]:
    """All jobs that match, newest first, in pages. Each page has the cursor of the next page."""
    need_lists(mill, query)
    while True:
        page, matching = _read(mill, query, size, cursor)
        cursor = page.cursor
        yield matching, cursor
        if not cursor:
            return


def need_lists(mill: Tidemill, query: JobQuery) -> None:
    """Raise FeatureMissing for a search that the broker cannot answer."""
    broker = mill.broker
    failed_only = query.states and query.states <= {State.FAILED}
    if Feature.INSPECT not in broker.features and not failed_only:
        raise lacks(broker.url, Feature.INSPECT, "a list of jobs that did not fail")


def count_of(
    mill: Tidemill, query: JobQuery, queues: list[QueueStats], patience: float = 0.25
) -> Count:
    """How many jobs match, counted for ``patience`` seconds at most; ``queues`` are all queues."""
    number = counted_by_queues(query, queues)
    if number is not None:
        return Count(number)
    if query.is_empty and (counted := count_all(mill)) is not None:
        return counted
    until, number = time.monotonic() + patience, 0
    for records, cursor in pages_of(mill, query):
        number += len(records)
        if cursor and time.monotonic() >= until:
            return Count(number, is_exact=False)
    return Count(number)


def count_all(mill: Tidemill) -> Count | None:
    """The number of all jobs, if the store counts them."""
    jobs = mill.broker.info().get("jobs")
    own = any(row.size or row.accepted for row in mill.broker.stats() if is_own(row.name))
    return Count(jobs) if isinstance(jobs, int) and not own else None


def counted_by_queues(query: JobQuery, queues: list[QueueStats]) -> int | None:
    """The number of jobs that match; None if the numbers of the queues do not tell."""
    states = query.states
    if not query.tokens.keys() <= {"state", "queue"} or not states or states & FINISHED:
        return None
    rows = [row for row in queues if query.what.queue in ("", row.name)]
    if any(state.value in row.unknown for row in rows for state in states):
        return None
    number: int = sum(getattr(row, state.value) for row in rows for state in states)
    return number
