"""The jobs that have run in the caller (``sync=True``), kept in the memory of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from tidemill.brokers.contract.inspection import Filter, Page, matches, number_of
from tidemill.brokers.contract.store import Store
from tidemill.core.job import Record
from tidemill.core.locks import Lock
from tidemill.errors import BrokerUnavailable, StoreFull

KEPT_MOST = 10_000  # the number of jobs that are kept; the oldest go first

KEPT_BYTES = 64 << 20
"""The bytes of arguments, results and tracebacks that are kept; the latest job stays anyway."""


class InlineJobs:
    """The jobs that have run in the caller, with the calls of a broker that handles use."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}  # in the order in which the jobs ended
        self._ended = 0
        self._bytes = 0
        self.after_fork()

    def after_fork(self) -> None:
        """Make a new lock: at the fork, another thread may have held the old lock."""
        self._lock = Lock()

    def keep(self, record: Record) -> None:
        with self._lock:
            self._ended += 1
            record.seq = self._ended
            self._drop(record.envelope.id)
            self._records[record.envelope.id] = record
            self._bytes += _size(record)
            while len(self._records) > (1 if self._bytes > KEPT_BYTES else KEPT_MOST):
                self._drop(next(iter(self._records)))

    def _drop(self, job_id: str) -> bool:
        record = self._records.pop(job_id, None)
        self._bytes -= 0 if record is None else _size(record)
        return record is not None

    def get(self, job_id: str) -> Record | None:
        return self._records.get(job_id)

    def was_here(self, job_id: str) -> bool:
        """False: this class does not remember the jobs that it no longer keeps."""
        return False

    def wait_for(
        self, job_ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        """The records of jobs, at once."""
        return [self.get(job_id) for job_id in job_ids]

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        """Records that match, newest first. The cursor is the number of the last record."""
        below = number_of(cursor) if cursor else self._ended + 1
        with self._lock:
            records = [*reversed(self._records.values())]
        found = [record for record in records if record.seq < below and matches(record, what)]
        page = [record.for_list() for record in found[:limit]]
        return Page(page, str(found[limit - 1].seq) if len(found) > limit else "")

    def _unchanged(self, job_ids: Iterable[str], **_: object) -> list[bool]:
        """False for each job: it has finished, and nobody would run it again."""
        return [False for _ in job_ids]

    cancel = retry = alter = _unchanged

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        """Forget jobs; False for a job that is not here."""
        with self._lock:
            return [self._drop(job_id) for job_id in job_ids]


def _size(record: Record) -> int:
    traces = sum(len(attempt.traceback) for attempt in record.attempts)
    return len(record.envelope.body) + len(record.raw_result) + traces


JobStore = Store | InlineJobs
"""The place where an app finds its jobs: the broker, or with ``sync=True`` this module."""


def move_due(store: JobStore) -> None:
    """Have the store judge all jobs by its clock, now.

    A store moves jobs when a worker or a waiting caller asks it to. So a job that nobody has run by
    its ``expires`` would stay ``ready`` to those who only look.
    """
    if not isinstance(store, InlineJobs):
        # A full or locked store can still be read.
        with contextlib.suppress(StoreFull, BrokerUnavailable):
            store.wait_space("", 0.0)  # each wait first moves what is due; no queue has this name
