"""Accept jobs: new jobs, and jobs whose key another job has."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

from tidemill.brokers.contract.schedules import LeftOut
from tidemill.brokers.rules import workflows
from tidemill.brokers.rules.limits import declare
from tidemill.brokers.rules.transitions import Item, Jobs
from tidemill.core.envelope import Envelope, Unique
from tidemill.core.job import Conflict, Placed, Put, State
from tidemill.errors import DuplicateJob, QueueFull


def put(
    jobs: Jobs, envelopes: Sequence[Envelope], hold: Collection[str], let_go: Collection[str]
) -> list[Put]:
    _refuse_any(jobs, envelopes)
    workflows.refuse_any(jobs, envelopes, let_go)
    puts = [_put_one(jobs, envelope) for envelope in envelopes]
    begun = [job.id for job in envelopes if job.links and job.links.waits and job.id not in hold]
    for job_id in (*let_go, *begun):
        workflows.let_go(jobs, job_id)
    return puts


def follow(jobs: Jobs, envelopes: Sequence[Envelope]) -> None:
    """Put the followers of a verdict. Queues may exceed ``max_size``: settling must not fail."""
    begun = []
    for job in envelopes:
        taken = jobs.keys.get(job.key) or jobs.held_by(job.key)
        rejected = job.on_conflict == Conflict.REJECT and taken
        if job.id not in jobs.items and not rejected:
            _put_one(jobs, job)
            if job.links and job.links.waits:
                begun.append(job.id)
    for job_id in begun:
        workflows.let_go(jobs, job_id)


def put_if_it_fits(jobs: Jobs, job: Envelope) -> str:
    """Put a schedule's job, or return the reason why it is left out."""
    if job.id in jobs.items:
        return LeftOut.ID
    held = bool(job.key) and bool(job.key in jobs.keys or jobs.held_by(job.key))
    if held and job.on_conflict == Conflict.REJECT:
        return LeftOut.KEY
    row = jobs.stats.get(job.queue)
    if not held and row and 0 < row.max_size <= row.size:
        return LeftOut.FULL
    placed = _put_one(jobs, job).placed
    return LeftOut.KEY if placed in (Placed.KEPT, Placed.MERGED) else ""


def _refuse_any(jobs: Jobs, envelopes: Sequence[Envelope]) -> None:
    """Refuse all puts if one put must be refused, before any job is stored."""
    ids: set[str] = set()
    holders: dict[str, list[tuple[str, bool]]] = {}  # key -> (queue, runs) of job and successor
    added: collections.Counter[str] = collections.Counter()
    for job in envelopes:
        if job.key and job.key not in holders:
            records = [jobs.items[i].record for i in jobs.keys.get(job.key, [])]
            holders[job.key] = [(r.envelope.queue, r.state is State.RUNNING) for r in records]
        held = holders[job.key] if job.key else []
        over = bool(job.key and jobs.held_by(job.key))
        if (held or over) and job.on_conflict == Conflict.REJECT:
            raise DuplicateJob.of_key(job.key, job.id)
        if job.id in jobs.items or job.id in ids:
            raise DuplicateJob(f"a job with the id {job.id!r} exists already", job.id)
        if over or (held and job.on_conflict != Conflict.REPLACE):
            continue
        stays = [holder for holder in held[:1] if holder[1]]
        for queue, _ in held[len(stays) :]:
            added[queue] -= 1
        row = jobs.stats.get(job.queue)
        waits = job.links is not None and job.links.waits
        if row and row.max_size and not waits and row.size + added[job.queue] >= row.max_size:
            raise QueueFull(f"queue {job.queue!r} holds max_size={row.max_size} jobs already")
        added[job.queue] += 1
        ids.add(job.id)
        if job.key:
            holders[job.key] = [*stays, (job.queue, False)]


def _put_one(jobs: Jobs, job: Envelope) -> Put:
    holders = jobs.keys.get(job.key) if job.key else None
    if not holders and job.key and (over := jobs.held_by(job.key)):
        return Put(over, Placed.KEPT)
    if not holders:
        waits = job.links is not None and job.links.waits
        _insert(jobs, job, State.WAITING if waits else State.READY)
        return Put(job.id, Placed.CREATED)
    current = jobs.items[holders[0]]
    running = current.record.state is State.RUNNING
    if job.on_conflict == Conflict.MERGE and not running:
        _merge(jobs, current, job)
        return Put(current.record.envelope.id, Placed.MERGED)
    if job.on_conflict != Conflict.REPLACE:
        return Put(current.record.envelope.id, Placed.KEPT)
    displaced = holders[1:] if running else holders[:]
    since = jobs.items[displaced[-1]].since if displaced else 0.0
    # End the successor first: if the job ended first, the successor would get the key.
    for old in reversed(displaced):
        jobs.finish(jobs.items[old], State.CANCELLED, f"replaced by {job.id}")
    if not running:
        _insert(jobs, job, State.READY, since)
        return Put(job.id, Placed.REPLACED)
    holders.append(job.id)
    current.until = current.since = 0.0  # the successor will take the key, with its own period
    _insert(jobs, job, State.WAITING, since)
    return Put(job.id, Placed.SUCCESSOR)


def _merge(jobs: Jobs, item: Item, job: Envelope) -> None:
    """Merge a put into a job: the higher priority and the earlier time win, the body stays."""
    record = item.record
    record.rank = min(record.rank, job.rank)
    due = record.due, item.due_machine
    if record.state is State.SCHEDULED:
        due = min(due, jobs.due_of(job), key=lambda times: jobs.left(*times))
    jobs.move(item, *due)


def _insert(jobs: Jobs, job: Envelope, state: State, since: float = 0.0) -> None:
    declare(jobs, job.limit, anew=job.planned is None)
    item = jobs.items[job.id] = Item(job, jobs.next_number())
    jobs.queue(job.queue).accepted += 1
    if job.key:
        jobs.keys.setdefault(job.key, [job.id])
    if job.expires:
        item.record.expires, item.expires_machine = jobs.due_after(job.expires)
        jobs.look_at(item, item.expires_machine)
    item.record.due, item.due_machine = jobs.due_of(job)
    if job.key and job.unique is not None:
        _set_period(jobs, item, job.unique, since)
    item.record.state = state
    jobs.count(item, +1)
    workflows.enlist(jobs, item)
    if state is not State.WAITING:
        jobs.move(item, item.record.due, item.due_machine)


def _set_period(jobs: Jobs, item: Item, unique: Unique, since: float) -> None:
    if unique.period:
        item.until = jobs.now + unique.period
    if unique.max_wait:
        item.since = since or jobs.now
        left = max(0.0, item.since + unique.max_wait - jobs.now)
        if jobs.left(item.record.due, item.due_machine) > left:
            item.record.due, item.due_machine = jobs.due_after(left)
