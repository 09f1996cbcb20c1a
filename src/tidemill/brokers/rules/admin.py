"""Requests on jobs and queues: cancel, retry, delete, alter. Each request reports its changes."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.brokers.rules.settle import log
from tidemill.brokers.rules.transitions import Item, Jobs
from tidemill.brokers.rules.workflows import may_wait_anew, revive, wait_anew
from tidemill.core.job import (
    CANCEL_ASKED,
    NOT_STARTED,
    RETRY_ASKED,
    WAITING_STATES,
    Command,
    RunOn,
    State,
    altered_text,
    purged,
)

Send = Callable[[str, Command], object]


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


def retry(
    jobs: Jobs,
    job_id: str,
    *,
    force: bool = False,
    due: float = 0.0,
    only_scheduled: bool = False,
    asked: bool = True,
) -> bool:
    """Make a job ready or scheduled again; with ``force`` also a succeeded job.

    With ``force`` the job also takes its key from a succeeded job. ``asked`` is False when nobody
    asked for a retry.
    """
    item = jobs.items.get(job_id)
    if item is None or (only_scheduled and item.record.state is not State.SCHEDULED):
        return False
    envelope = item.record.envelope
    again = force and item.record.state is State.SUCCEEDED and envelope.links is None
    if again or item.record.state in (State.FAILED, State.CANCELLED, State.EXPIRED):
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
    if asked and not only_scheduled:
        log(item, RETRY_ASKED, jobs.wall)
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


def set_queue(
    jobs: Jobs, queue: str, *, paused: bool | None = None, max_size: int | None = None
) -> None:
    jobs.check_here()
    row = jobs.queue(queue)
    row.paused = row.paused if paused is None else paused
    row.max_size = row.max_size if max_size is None else max_size


def forget_queue(jobs: Jobs, queue: str) -> bool:
    jobs.check_here()
    if jobs.queue(queue).size:
        return False
    del jobs.stats[queue]
    return True
