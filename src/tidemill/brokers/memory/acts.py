"""Acting on jobs by their ids: each says whether it did anything."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.brokers.memory.flows import flow, revive
from tidemill.brokers.memory.jobs import Item, Jobs
from tidemill.brokers.memory.verdicts import log
from tidemill.job import CANCEL_ASKED, NOT_STARTED, Command, State, Waits

__all__ = ["cancel", "delete", "forget_queue", "kick", "purge"]

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
    """Make a job ready again.

    With ``force`` also one that succeeded, or whose key a success holds.
    """
    item = jobs.items.get(job_id)
    if item is None or item.waits == Waits.BARRIER:  # which is never run
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
    """Begin a new run, with all attempts and without an end. The trail stays."""
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
    """Delete what waits in a queue, in whatever state; how many that were."""
    waiting = (State.WAITING, State.SCHEDULED, State.READY)
    records = [item.record for item in jobs.items.values()]
    gone = [r for r in records if r.envelope.queue == queue and r.state in waiting]
    jobs.flowing = True  # not before all are gone: what is purged is not cancelled
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
