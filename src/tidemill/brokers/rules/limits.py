"""Limits: choose the ready jobs that may start, counted over all owners.

A job under a limit waits in its ready list with the other jobs, and a claim passes over the job
while its limit is closed. (A store with an index keeps such jobs in a separate table, so that no
claim walks over these jobs. It leases the same jobs at the same time.) A *partition* is one key of
one limit. In a ready list only the first job of each partition can be next. Partitions with a key
take turns: after a lease, a partition comes after the partitions that got no lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tidemill.brokers.rules.transitions import Item, Jobs, Limit, Ready, ReadyList
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings
from tidemill.core.job import State
from tidemill.limits import arithmetic


def micros(jobs: Jobs) -> int:
    """Now, in the microseconds of limiters."""
    return int(jobs.now * 1e6)


def set_limit(
    jobs: Jobs, name: str, settings: LimitSettings | None, *, queue: bool, declared: bool
) -> None:
    table = jobs.queue_limits if queue else jobs.limits
    if queue:
        jobs.queue(name)
    known = table.get(name)
    if known is None:
        known = table[name] = Limit()
    old = arithmetic.apply_settings(known, settings, declared=declared)
    if known.terms != old:
        rows = jobs.partitions.items()
        limiters = [partition.limiter for (limit, _), partition in rows if limit == name]
        for limiter in [known.limiter] if queue else limiters:
            arithmetic.change(old, known.terms, limiter, micros(jobs))


def declare(jobs: Jobs, claim: JobLimit | None, *, anew: bool = True) -> None:
    """Declare the limit of a new job; without ``anew``, only if the limit is unknown."""
    if claim is not None and (anew or claim.name not in jobs.limits):
        set_limit(jobs, claim.name, claim.terms, queue=False, declared=True)


def is_open(jobs: Jobs, queue: str) -> bool:
    return not _queue_opens(jobs, queue)


def first_of(jobs: Jobs, line: ReadyList) -> Ready | None:
    """(rank, turn, id) of the next job in a ready list that may start now."""
    entries = jobs.ready.get(line, [])
    if not jobs.limits:
        return entries[0] if entries else None
    return min(_may_start(jobs, entries), default=None)


def turn_of(jobs: Jobs, item: Item) -> int:
    """The order of a job within its priority: its sequence, or the turn of its partition."""
    claim = item.record.envelope.limit
    return max(item.record.seq, jobs.partition(claim).turn if claim and claim.key else 0)


def _may_start(jobs: Jobs, entries: list[Ready]) -> Iterator[Ready]:
    for item, claim in _firsts(jobs, entries):
        if claim is None or not _partition_opens(jobs, claim):
            yield item.record.rank, turn_of(jobs, item), item.record.envelope.id


def _firsts(jobs: Jobs, entries: list[Ready]) -> Iterator[tuple[Item, JobLimit | None]]:
    """The first job of each partition in a ready list, and every job without a limit."""
    seen: set[tuple[str, str]] = set()
    for _, _, job_id in entries:
        item = jobs.items[job_id]
        claim = item.record.envelope.limit
        if claim is None:
            yield item, None
        elif (claim.name, claim.key) not in seen:
            seen.add((claim.name, claim.key))
            yield item, claim


def _queue_opens(jobs: Jobs, queue: str) -> int:
    limited = jobs.queue_limits.get(queue)
    if limited is None:
        return 0
    return arithmetic.opens(limited.terms, limited.limiter, jobs.queue(queue).running, micros(jobs))


def _partition_opens(jobs: Jobs, claim: JobLimit) -> int:
    partition, settings = jobs.partition(claim), jobs.limits[claim.name].terms
    return arithmetic.opens(
        settings, partition.limiter, partition.running, micros(jobs), claim.cost
    )


def next_opening(jobs: Jobs) -> float:
    """Seconds until a closed limit opens for a ready job; infinity if no limit opens by itself."""
    rows = [jobs.queue(name) for name in jobs.queue_limits]
    times = [_queue_opens(jobs, row.name) for row in rows if row.ready]
    if jobs.limits:
        for entries in jobs.ready.values():
            times += [_partition_opens(jobs, claim) for _, claim in _firsts(jobs, entries) if claim]
    times = [when for when in times if 0 < when < arithmetic.NEVER]
    return min(times) / 1e6 - jobs.now if times else float("inf")


def start(jobs: Jobs, item: Item, number: int) -> None:
    """Take the tokens of a leased job, and put its partition after the other partitions."""
    envelope, now = item.record.envelope, micros(jobs)
    limited = jobs.queue_limits.get(envelope.queue)
    if limited is not None:
        arithmetic.take(limited.terms, limited.limiter, now)
    if envelope.limit is not None:
        partition = jobs.partition(envelope.limit)
        arithmetic.take(
            jobs.limits[envelope.limit.name].terms, partition.limiter, now, envelope.limit.cost
        )
        partition.turn = number


def unstart(jobs: Jobs, item: Item) -> None:
    taken = int((jobs.now - jobs.wall + item.record.leased) * 1e6)
    for settings, limiter, cost in _limiters_of(jobs, item):
        arithmetic.give_back(settings, limiter, taken, cost)


def _limiters_of(
    jobs: Jobs, item: Item
) -> Iterator[tuple[LimitSettings, arithmetic.Limiter, float]]:
    envelope = item.record.envelope
    limited = jobs.queue_limits.get(envelope.queue)
    if limited is not None:
        yield limited.terms, limited.limiter, 1.0
    if envelope.limit is not None:
        settings = jobs.limits[envelope.limit.name].terms
        yield settings, jobs.partition(envelope.limit).limiter, envelope.limit.cost


def attempted(jobs: Jobs, item: Item, *, well: bool) -> None:
    limited = jobs.queue_limits.get(item.record.envelope.queue)
    if limited is not None:
        arithmetic.ended(limited.terms, limited.limiter, micros(jobs), well=well)


def held(jobs: Jobs, job_id: str) -> arithmetic.Held | None:
    item = jobs.items.get(job_id)
    if item is None or item.record.state is not State.READY:
        return None
    return arithmetic.first_closed(_limits_of(jobs, item.record.envelope))


def _limits_of(jobs: Jobs, envelope: Envelope) -> Iterator[arithmetic.Held]:
    claim, queue = envelope.limit, envelope.queue
    if claim is not None:
        settings, running = jobs.limits[claim.name].terms, jobs.partition(claim).running
        until = _seconds(jobs, _partition_opens(jobs, claim))
        yield arithmetic.Held(claim.name, claim.key, False, until, running, settings)
    limited = jobs.queue_limits.get(queue)
    if limited is not None:
        until, running = _seconds(jobs, _queue_opens(jobs, queue)), jobs.queue(queue).running
        yield arithmetic.Held(queue, "", True, until, running, limited.terms, limited.is_broken)


def show(jobs: Jobs) -> list[arithmetic.LimitStats]:

    def stats(name: str, limit: Limit, running: int, **more: Any) -> arithmetic.LimitStats:
        own: dict[str, Any] = {
            "terms": limit.terms,
            "declared": limit.declared,
            "by_hand": limit.by_hand,
        }
        return arithmetic.LimitStats(name=name, running=running, **own, **more)

    rows = []
    for name, limit in sorted(jobs.queue_limits.items()):
        until = _seconds(jobs, _queue_opens(jobs, name))
        more: dict[str, Any] = {"failures": limit.limiter.failures, "until": until}
        rows.append(stats(name, limit, jobs.queue(name).running, queue=True, **more))
    sweep(jobs)
    for name, limit in sorted(jobs.limits.items()):
        keys = [part for (of, _), part in jobs.partitions.items() if of == name]
        rows.append(stats(name, limit, sum(part.running for part in keys), keys=len(keys)))
    return rows


def _seconds(jobs: Jobs, when: int) -> float:
    if not when:
        return 0.0
    return when / 1e6 - jobs.now if when < arithmetic.NEVER else float("inf")


def sweep(jobs: Jobs) -> None:
    """Forget empty partitions whose limiter equals a new limiter."""
    ready = [entry[2] for entries in jobs.ready.values() for entry in entries]
    claims = [jobs.items[job_id].record.envelope.limit for job_id in ready]
    used = {(claim.name, claim.key) for claim in claims if claim}
    for place, partition in list(jobs.partitions.items()):
        clear = arithmetic.clear_at(jobs.limits[place[0]].terms, partition.limiter)
        if place not in used and not partition.running and clear <= micros(jobs):
            del jobs.partitions[place]
    for name, key in used:
        jobs.partition(JobLimit(name, key))
