"""Requests on jobs and queues: cancel, kick, delete, alter. Each request reports its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.memory.part import Part
from tidemill.brokers.memory.settle import log
from tidemill.brokers.memory.transitions import Item, Jobs
from tidemill.brokers.memory.workflows import may_wait_anew, revive, wait_anew
from tidemill.core.job import (
    CANCEL_ASKED,
    NOT_STARTED,
    WAITING_STATES,
    RunOn,
    State,
    altered_text,
)
from tidemill.core.owner import Command
from tidemill.core.purge_mark import purged

Send = Callable[[str, Command], object]

_KICKABLE = {State.FAILED, State.CANCELLED, State.EXPIRED}


def cancel(jobs: Jobs, job_id: str, send: Send, *, terminate: bool, purge: str) -> bool:
    """Cancel an unfinished job; a running job through its owner, and not for a purge."""
    item = jobs.items.get(job_id)
    if item is None or item.record.state.finished:
        return False
    if purge and item.record.state is State.RUNNING:
        return False
    if item.record.state is State.RUNNING:
        item.record.cancelling = True
        log(item, CANCEL_ASKED[terminate], jobs.wall)
        send(item.holder, Command("terminate" if terminate else "cancel", item.token))
    else:
        jobs.finish(item, State.CANCELLED, purged(purge) if purge else NOT_STARTED)
        if purge:
            row = jobs.queue(item.record.envelope.queue)
            row.cancelled, row.purged = row.cancelled - 1, row.purged + 1
    return True


def kick(
    jobs: Jobs,
    job_id: str,
    *,
    force: bool = False,
    due: float = 0.0,
    only_scheduled: bool = False,
) -> bool:
    """Make a job ready or scheduled again; with ``force`` also a succeeded job.

    With ``force`` the job also takes its key from a succeeded job.
    """
    item = jobs.items.get(job_id)
    if item is None or (only_scheduled and item.record.state is not State.SCHEDULED):
        return False
    envelope = item.record.envelope
    again = force and item.record.state is State.SUCCEEDED and envelope.links is None
    if again or item.record.state in _KICKABLE:
        if not may_wait_anew(item):
            return False
        key = envelope.key
        if key and (jobs.keys.get(key) or (jobs.held_by(key) and not force)):
            return False  # another job has the key
        if key:
            jobs.keys[key] = [job_id]
            item.until, item.since = jobs.held.pop(key, (0.0, ""))[0], 0.0
        _begin_anew(jobs, item)
    elif item.record.state is not State.SCHEDULED:
        return False
    if item.record.pending or item.waits == RunOn.BARRIER:
        wait_anew(jobs, item)
    else:
        jobs.move(item, due, 0.0)
    return True


def _begin_anew(jobs: Jobs, item: Item) -> None:
    """Begin a new run with all attempts. The history of the job stays."""
    item.dropped = False
    revive(jobs, item)
    jobs.unfinish(item)
    record = item.record
    record.attempt, item.limit = 0, record.envelope.retries.max_attempts
    record.losses, record.finished, record.cancelling = 0, 0.0, False
    record.error, record.raw_result = "", b""
    item.expires_machine, record.expires = 0.0, 0.0


def delete(jobs: Jobs, job_id: str) -> bool:
    """Forget a job in any state."""
    item = jobs.items.get(job_id)
    if item is None:
        return False
    if item.record.state.finished:
        key = item.record.envelope.key
        if jobs.held_by(key) == job_id:
            del jobs.held[key]
        jobs.unfinish(item)
        del jobs.items[job_id]
    else:
        jobs.forget(item)
    return True


def alter(jobs: Jobs, job_id: str, rank: int | None, queue: str | None) -> bool:
    """Give a waiting job a new rank, or move the job to another queue if that queue has room."""
    item = jobs.items.get(job_id)
    if item is None or item.record.state not in WAITING_STATES or item.waits == RunOn.BARRIER:
        return False
    record, text = item.record, altered_text(rank, queue)
    rank = record.rank if rank is None else rank
    queue = record.envelope.queue if queue is None else queue
    if queue != record.envelope.queue and record.state is not State.WAITING:
        row = jobs.stats.get(queue)
        if row is not None and 0 < row.max_size <= row.size:
            return False
    if (rank, queue) == (record.rank, record.envelope.queue):
        return True
    log(item, text, jobs.wall)
    jobs.alter(item, rank, queue)
    return True


def forget_queue(jobs: Jobs, queue: str) -> bool:
    """Forget the counters and settings of a queue without unfinished jobs."""
    row = jobs.stats.get(queue)
    if row is not None and row.size:
        return False
    jobs.stats.pop(queue, None)
    return True


class Admin(Part):
    """Requests that change jobs, queues and owners."""

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            jobs, send = self._jobs, self.command
            return [cancel(jobs, i, send, terminate=terminate, purge=purge) for i in job_ids]

    def kick(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            how: dict[str, Any] = {"force": force, "due": due, "only_scheduled": only_scheduled}
            kicked = [kick(self._jobs, i, **how) for i in job_ids]
            self._wake_all()
            return kicked

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        with self._lock:
            self._jobs.check_here(deletes=True)
            deleted = [delete(self._jobs, i) for i in job_ids]
            self._wake_all()
            return deleted

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            altered = [alter(self._jobs, i, rank, queue) for i in job_ids]
            self._wake_all()
            return altered

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        with self._lock:
            self._jobs.check_here()
            row = self._jobs.queue(queue)
            row.paused = row.paused if paused is None else paused
            row.max_size = row.max_size if max_size is None else max_size
            self._wake_all()

    def forget_queue(self, queue: str) -> bool:
        with self._lock:
            self._jobs.check_here()
            return forget_queue(self._jobs, queue)

    def command(self, owner_id: str, command: Command) -> bool:
        with self._lock:
            if owner_id not in self._owners:
                return False
            self._commands[owner_id].append(command)
            self.wake(owner_id)
            return True

    def backup(self, target: str) -> None:
        raise lacks(self.url, Feature.BACKUP, "backup")
