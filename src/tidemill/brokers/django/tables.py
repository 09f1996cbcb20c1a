"""The tables as the containers that the memory broker works on. Rows are read when needed.

Each container reads the rows that a rule needs, keeps them during one transaction, and writes the
changed rows when :class:`.jobs.StoredJobs` is flushed. ``need`` reads many rows by one statement.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

from tidemill.brokers.django.dialects import Dialect, Statement
from tidemill.brokers.django.rows import STATES
from tidemill.brokers.rules.transitions import Queue
from tidemill.core.clock import clock
from tidemill.core.job import State

_PART = 500


class Rows(abc.ABC):
    """Statements on one connection: the broker's own, or one that a caller lends."""

    dialect: Dialect

    @abc.abstractmethod
    def execute(self, text: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run a statement, and return its rows."""

    @abc.abstractmethod
    def execute_many(self, text: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run a statement for each row."""

    def execute_all(self, statements: Sequence[Statement]) -> list[list[Any]]:
        """Run statements, in one message where the driver can, and return the rows of each."""
        return [self.execute(text, parameters) for text, parameters in statements]

    def send(self, text: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement whose answer nobody needs: it may travel with the next statement."""
        self.execute(text, parameters)

    def now(self) -> float:
        """The database's time, in epoch seconds."""
        now = self.dialect.now
        return self.time_of(self.execute(f"SELECT {now}")[0][0] if now else 0.0)

    def time_of(self, answer: float) -> float:
        """The time in the database's answer, or of this machine if the database uses its clock."""
        return float(answer) + clock.server_ahead() if self.dialect.now else clock.database()

    def select_in(self, text: str, values: Iterable[Any]) -> Iterator[Sequence[Any]]:
        """The rows of a query that ends with ``IN``, for any number of values."""
        for statement in select_in(text, values):
            yield from self.execute(*statement)

    def send_in(self, text: str, values: Iterable[Any]) -> None:
        """Run a statement that ends with ``IN``, for any number of values."""
        for statement in select_in(text, values):
            self.send(*statement)

    def upsert(
        self, table: str, keys: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[Any]]
    ) -> None:
        """Insert rows, or replace the rows of the same keys."""
        before, behind = self.dialect.upsert(table, keys, columns)
        self.insert_between(before, rows, behind)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        names = ", ".join(f'"{name}"' for name in columns)
        self.insert_between(f"INSERT INTO {table} ({names}) VALUES ", rows, "")

    def insert_between(self, before: str, rows: Sequence[Sequence[Any]], behind: str) -> None:
        """Insert rows, by the text before and after the rows."""
        if not rows:
            return
        mark = "(" + ", ".join(["%s"] * len(rows[0])) + ")"
        for part in in_parts(rows, max(1, self.dialect.most_parameters // len(rows[0]))):
            values = [value for row in part for value in row]
            self.send(before + ", ".join([mark] * len(part)) + behind, values)


def select_in(text: str, values: Iterable[Any]) -> list[Statement]:
    """The statements of a query that ends with ``IN``, for any number of values."""
    parts = in_parts(list(values), _PART)
    return [(f"{text} ({', '.join(['%s'] * len(part))})", part) for part in parts]


def in_parts(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


# -- keys ------------------------------------------------------------------------------------------


class Keys(dict[str, list[str]]):
    """Key -> the job that has the key, and its successor; see ``Jobs.keys``."""

    def __init__(self, rows: Rows, held: HeldKeys) -> None:
        super().__init__()
        self._rows = rows
        self.held = held
        held.need = self.need
        self._before: dict[str, list[str]] = {}

    def need(self, keys: Iterable[str]) -> None:
        new = [key for key in dict.fromkeys(keys) if key and key not in self._before]
        if not new:
            return
        self._before |= {key: [] for key in new}
        text = 'SELECT "key", place, job, "until" FROM tidemill_key WHERE "key" IN'
        for key, place, job, until in sorted(map(tuple, self._rows.select_in(text, new))):
            if place == 3:
                self.held.load(key, until, job)
            else:
                self._before[key].append(job)
        for key in new:
            if self._before[key]:
                super().__setitem__(key, list(self._before[key]))

    def get(self, key: str, default: Any = None) -> Any:
        self.need([key])
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.need([str(key)])
        return super().__contains__(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.need([key])
        return super().setdefault(key, default)

    def flush(self) -> None:
        changed = [key for key, jobs in self._before.items() if dict.get(self, key, []) != jobs]
        held = self.held.changed()
        if not changed and not held:
            return
        for part in in_parts(list(dict.fromkeys([*changed, *held])), _PART):
            self._rows.send_in('DELETE FROM tidemill_key WHERE "key" IN', part)
            rows: list[tuple[str, int, str, float]] = []
            for key in part:
                jobs: list[str] = self[key] if dict.__contains__(self, key) else []
                rows += [(key, place, job, 0.0) for place, job in enumerate(jobs, 1)]
                if key in self.held.known:
                    until, job = self.held.known[key]
                    rows.append((key, 3, job, until))
            self._rows.insert("tidemill_key", ("key", "place", "job", "until"), rows)
        for key in changed:
            self._before[key] = list(self[key]) if dict.__contains__(self, key) else []
        self.held.clean()


class HeldKeys(MutableMapping[str, tuple[float, str]]):
    """Key -> the time until which a succeeded job keeps the key, and the job; see ``Jobs.held``."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[float, str]] = {}
        self._before: dict[str, tuple[float, str]] = {}
        self.need: Callable[[list[str]], None] = lambda _: None  # :class:`Keys` sets it

    def load(self, key: str, until: float, job: str) -> None:
        self.known[key] = self._before[key] = until, job

    def __getitem__(self, key: str) -> tuple[float, str]:
        self.need([key])
        return self.known[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)

    def __setitem__(self, key: str, value: tuple[float, str]) -> None:
        self.need([key])
        self.known[key] = value

    def __delitem__(self, key: str) -> None:
        self.need([key])
        del self.known[key]

    def changed(self) -> list[str]:
        """The keys whose holder changed."""
        every = {**self.known, **self._before}
        return [key for key in every if self.known.get(key) != self._before.get(key)]

    def clean(self) -> None:
        """Forget the changes after they are written."""
        self._before = dict(self.known)


# -- queues ----------------------------------------------------------------------------------------

_TOTALS = ("accepted", "succeeded", "failed", "cancelled", "expired", "retried", "purged")
QUEUE_COLUMNS = ("name", "paused", "max_size", *_TOTALS)


_SPARE = 1000  # a count of jobs stops this far above the bound; a put replaces fewer jobs than that


class QueueRow:
    """A queue's settings and totals; its unfinished jobs are counted when asked for."""

    def __init__(self, rows: Rows, name: str, values: Sequence[Any] | None) -> None:
        self._rows = rows
        self.name = name
        self.before = tuple(values) if values is not None else None
        numbers: Sequence[int] = values if values is not None else [0] * 9
        self.paused = bool(numbers[0])
        self.max_size, self.accepted, self.succeeded, self.failed = numbers[1:5]
        self.cancelled, self.expired, self.retried, self.purged = numbers[5:]
        self._stored: dict[State, int] = {}
        self._since: dict[State, int] = {}

    def change(self, state: State, by: int) -> None:
        """Count a job in or out of a state."""
        if not state.finished:
            self._since[state] = self._since.get(state, 0) + by
        elif by > 0:
            setattr(self, state.value, getattr(self, state.value) + by)

    def count(self, state: State) -> int:
        """The number of jobs in an unfinished state; the count stops far above the bound."""
        if state not in self._stored:
            some = "SELECT 1 FROM tidemill_job WHERE queue = %s AND state = %s AND state <= 3"
            text = f"SELECT count(*) FROM ({some} LIMIT %s) AS found"
            most = self.max_size + _SPARE
            [(count,)] = self._rows.execute(text, [self.name, STATES.index(state), most])
            self._stored[state] = count
        return self._stored[state] + self._since.get(state, 0)

    @property
    def running(self) -> int:
        return self.count(State.RUNNING)

    @property
    def ready(self) -> int:
        return self.count(State.READY)

    @property
    def size(self) -> int:
        """Unfinished jobs."""
        return sum(self.count(state) for state in STATES[:4])

    def values(self) -> tuple[Any, ...]:
        """The values of the queue's row, without the name."""
        totals = (getattr(self, name) for name in _TOTALS)
        return (int(self.paused), self.max_size, *totals)

    def flushed(self) -> None:
        """Record that the changes of the queue and its jobs are written."""
        for state in self._stored:
            self._stored[state] += self._since.get(state, 0)
        self._since = {}
        self.before = self.values()


class Queues(MutableMapping[str, Queue]):
    """The queues of one transaction; see ``Jobs.stats``."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._read: dict[str, QueueRow] = {}
        self._known: set[str] = set()
        self._gone: set[str] = set()

    def need(self, names: Iterable[str]) -> None:
        for statement in self.asking(names):
            self.load(self._rows.execute(*statement))

    def asking(self, names: Iterable[str]) -> list[Statement]:
        """The statements that read these queues; :meth:`load` takes their rows."""
        new = [name for name in dict.fromkeys(names) if name not in self._known]
        self._known.update(new)
        return select_in(
            f"SELECT {', '.join(QUEUE_COLUMNS)} FROM tidemill_queue WHERE name IN", new
        )

    def load(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add the queues that rows store."""
        for name, *values in rows:
            self._read[name] = QueueRow(self._rows, name, values)

    def __getitem__(self, name: str) -> QueueRow:
        if name not in self._known:
            self.need([name])
        return self._read[name]

    def __setitem__(self, name: str, row: Queue) -> None:
        assert isinstance(row, QueueRow)
        self._read[name] = row

    def __delitem__(self, name: str) -> None:
        del self._read[name]
        self._gone.add(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)

    def row(self, name: str) -> QueueRow:
        """The row of a queue; a new queue gets a new row."""
        try:
            return self[name]
        except KeyError:
            row = self._read[name] = QueueRow(self._rows, name, None)
            return row

    def flush(self) -> None:
        for name in self._gone:
            self._rows.send("DELETE FROM tidemill_queue WHERE name = %s", [name])
        self._gone.clear()
        changed = [row for row in self._read.values() if row.values() != row.before]
        rows = [(row.name, *row.values()) for row in changed]
        self._rows.upsert("tidemill_queue", ["name"], QUEUE_COLUMNS, rows)
        for row in self._read.values():
            row.flushed()
