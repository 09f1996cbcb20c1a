"""Requests on jobs and queues: cancel, kick, delete, purge. Each reports what it changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.memory.part import Part
from tidemill.brokers.memory.settle import log
from tidemill.brokers.memory.transitions import Item, Jobs
from tidemill.brokers.memory.workflows import flow, revive
from tidemill.core.job import CANCEL_ASKED, NOT_STARTED, Command, RunOn, State

__all__ = ["Admin", "cancel", "delete", "forget_queue", "kick", "purge"]

Send = Callable[[str, Command], object]

_KICKABLE = {State.FAILED, State.CANCELLED, State.EXPIRED}


def cancel(jobs: Jobs, job_id: str, send: Send, *, terminate: bool) -> bool:
    """Cancel an unfinished job; a running one through its owner."""
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
    if item is None or item.waits == RunOn.BARRIER:  # a barrier never runs
        return False
    envelope = item.record.envelope
    again = force and item.record.state is State.SUCCEEDED and envelope.links is None
    if again or item.record.state in _KICKABLE:
        key = envelope.key
        if key and (jobs.keys.get(key) or (jobs.held_by(key) and not force)):
            return False  # at most one unfinished job per key
        if key:
            jobs.keys[key] = [job_id]
            item.until, item.since = jobs.held.pop(key, (0.0, ""))[0], 0.0
        _begin_anew(jobs, item)
    elif item.record.state is not State.SCHEDULED:
        return False
    jobs.move(item, 0.0, 0.0)
    return True


def _begin_anew(jobs: Jobs, item: Item) -> None:
    """Begin a new run with all its attempts. The history stays."""
    item.dropped = False
    revive(jobs, item)
    jobs.unfinish(item)
    record = item.record
    record.attempt, item.limit = 0, record.envelope.retries.max_attempts
    record.losses, record.finished, record.cancelling = 0, 0.0, False
    record.error, record.result = "", b""
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


def purge(jobs: Jobs, queue: str) -> int:
    """Delete the waiting, scheduled and ready jobs of a queue; return how many."""
    waiting = (State.WAITING, State.SCHEDULED, State.READY)
    records = [item.record for item in jobs.items.values()]
    gone = [r for r in records if r.envelope.queue == queue and r.state in waiting]
    jobs.flowing = True  # count dependents down at the end: purged jobs are not cancelled
    purged = sum(delete(jobs, record.envelope.id) for record in gone)
    flow(jobs)
    if purged:
        jobs.queue(queue).purged += purged
    return purged


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
            self._jobs.check_here()
            deleted = [delete(self._jobs, i) for i in job_ids]
            self._wake_all()
            return deleted

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
