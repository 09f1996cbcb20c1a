"""Requests on jobs and queues: cancel, kick, delete, purge. Each request reports its changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidemill.brokers.contract.admin import KeptPurge
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.memory.part import Part
from tidemill.brokers.memory.settle import log
from tidemill.brokers.memory.transitions import Item, Jobs
from tidemill.brokers.memory.workflows import flow, may_wait_anew, revive, wait_anew
from tidemill.core.job import (
    CANCEL_ASKED,
    NOT_STARTED,
    WAITING_STATES,
    Record,
    RunOn,
    State,
    altered_text,
)
from tidemill.core.owner import Command
from tidemill.core.purge_mark import check_purge_id, had_waited, is_of_purge
from tidemill.core.purge_mark import purged as purged_error

Send = Callable[[str, Command], object]

_KICKABLE = {State.FAILED, State.CANCELLED, State.EXPIRED}


def cancel(jobs: Jobs, job_id: str, send: Send, *, terminate: bool) -> bool:
    """Cancel an unfinished job; a running job through its owner."""
    item = jobs.items.get(job_id)
    if item is None or item.record.state.finished:
        return False
    if item.record.state is State.RUNNING:
        item.record.cancelling = True
        log(jobs, item, CANCEL_ASKED[terminate], jobs.wall)
        send(item.holder, Command("terminate" if terminate else "cancel", item.token))
    else:
        jobs.finish(item, State.CANCELLED, NOT_STARTED)
    return True


def kick(jobs: Jobs, job_id: str, *, force: bool = False) -> bool:
    """Make a job ready again; with ``force`` also a succeeded job.

    With ``force`` the job also takes its key from a succeeded job.
    """
    item = jobs.items.get(job_id)
    if item is None:
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
        jobs.move(item, 0.0, 0.0)
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
    log(jobs, item, text, jobs.wall)
    jobs.alter(item, rank, queue)
    return True


def purge(jobs: Jobs, queue: str) -> int:
    """Delete the waiting, scheduled and ready jobs of a queue; return their number."""
    gone = _to_purge(jobs, queue)
    # Count dependents down at the end: earlier, this would cancel jobs that must be purged.
    jobs.flowing = True
    purged = sum(delete(jobs, record.envelope.id) for record in gone)
    flow(jobs)
    if purged:
        jobs.queue(queue).purged += purged
    return purged


def _to_purge(jobs: Jobs, queue: str) -> list[Record]:
    records = [item.record for item in jobs.items.values()]
    return [r for r in records if r.envelope.queue == queue and r.state in WAITING_STATES]


def purge_kept(jobs: Jobs, queue: str, purge_id: str) -> int:
    """Cancel the jobs that ``purge`` would delete, and mark them with the purge."""
    gone = _to_purge(jobs, queue)
    # Count dependents down at the end: earlier, this would end jobs that must be purged.
    jobs.flowing = True
    for record in gone:
        item = jobs.items[record.envelope.id]
        waited = record.state is State.WAITING and bool(item.waits)
        jobs.finish(item, State.CANCELLED, purged_error(purge_id, waited=waited))
    flow(jobs)
    if gone:
        row = jobs.queue(queue)
        row.cancelled -= len(gone)
        row.purged += len(gone)
    return len(gone)


def restore(jobs: Jobs, job_id: str, purge_id: str) -> bool:
    """Undo the purge of a job; False when the job cannot come back."""
    item = jobs.items.get(job_id)
    if item is None or item.record.state is not State.CANCELLED:
        return False
    record, key = item.record, item.record.envelope.key
    waits = had_waited(record.error)
    if not is_of_purge(record.error, purge_id):
        return False
    if waits and not may_wait_anew(item):
        return False
    if key and (jobs.keys.get(key) or jobs.held_by(key)):
        return False  # another job has the key
    if key:
        jobs.keys[key] = [job_id]
        item.until = item.since = 0.0
    revive(jobs, item)
    jobs.unfinish(item)
    record.error, record.finished = "", 0.0
    if item.expires_machine:
        jobs.look_at(item, item.expires_machine)
    if waits:
        wait_anew(jobs, item)
    else:
        jobs.move(item, record.due, item.due_machine)
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

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            jobs, send = self._jobs, self.command
            return [cancel(jobs, i, send, terminate=terminate) for i in job_ids]

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            kicked = [kick(self._jobs, i, force=force) for i in job_ids]
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

    def purge(self, queue: str) -> int:
        with self._lock:
            self._jobs.check_here()
            purged = purge(self._jobs, queue)
            self._wake_all()
            return purged

    def purge_kept(self, queue: str, purge_id: str) -> KeptPurge:
        check_purge_id(purge_id)
        with self._lock:
            self._jobs.check_here()
            purged = purge_kept(self._jobs, queue, purge_id)
            self._wake_all()
            return KeptPurge(purged)

    def restore(self, job_ids: Iterable[str], purge_id: str) -> list[bool]:
        with self._lock:
            self._jobs.check_here()
            restored = [restore(self._jobs, i, purge_id) for i in job_ids]
            self._wake_all()
            return restored

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
