"""Leaving for another store, and taking in what comes from one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.brokers.base import Departure
from tidemill.brokers.links import was_dropped
from tidemill.brokers.memory.jobs import Item, Jobs
from tidemill.brokers.memory.limits import declare
from tidemill.clock import new_id
from tidemill.errors import StoreMoved
from tidemill.job import Record, State

__all__ = ["adopt", "check_here", "depart", "gone"]


def depart(jobs: Jobs, where: str, seal: bool) -> Departure:
    """Begin to leave, or go on with it."""
    known = jobs.departure or Departure(new_id(), where)
    if known.where != where:
        raise gone(known)
    sealed = known.sealed or seal
    jobs.departure = Departure(known.mark, where, jobs.seq, sealed)
    return jobs.departure


def gone(departure: Departure) -> StoreMoved:
    """What somebody is told who wants something of a store that is left."""
    return StoreMoved(f"this store moves to {departure.where}; use that url")


def check_here(jobs: Jobs) -> None:
    """Refuse what would change a store that is left."""
    if jobs.departure is not None:
        raise gone(jobs.departure)


def adopt(jobs: Jobs, departure: Departure, records: Sequence[Record], cursor: str) -> list[bool]:
    """Take in jobs of a departed store."""
    _, first = jobs.arrivals.get(departure.mark, ("", jobs.seq))
    jobs.seq = max(jobs.seq, first + departure.last)
    jobs.arrivals[departure.mark] = cursor, first
    return [_adopt_one(jobs, record, first) for record in records]


def _adopt_one(jobs: Jobs, record: Record, first: int) -> bool:
    envelope, state = record.envelope, record.state
    if envelope.id in jobs.items:
        return False
    if envelope.key and not state.finished:
        holders = jobs.keys.setdefault(envelope.key, [])
        if len(holders) > (state is State.WAITING):
            return False
        holders.append(envelope.id)
    declare(jobs, envelope.limit, anew=False)
    item = jobs.items[envelope.id] = Item(envelope, first + record.seq)
    item.record = msgspec.structs.replace(
        record, seq=first + record.seq, attempts=list(record.attempts), log=list(record.log)
    )
    item.limit = record.max_attempts
    if record.expires and not state.finished:
        item.expires_machine = jobs.now + record.expires - jobs.wall
        jobs.look_at(item, item.expires_machine)
    if record.due and not record.due_by_wall:
        item.due_machine = jobs.now + record.due - jobs.wall
    jobs.count(item, +1)
    if envelope.key and envelope.unique is not None and envelope.unique.period:
        item.until = jobs.now + envelope.created + envelope.unique.period - jobs.wall
    free = not jobs.keys.get(envelope.key) and not jobs.held_by(envelope.key)
    if state is State.SUCCEEDED and item.until > jobs.now and free:
        jobs.held[envelope.key] = item.until, envelope.id
    if state.finished:
        item.finished_machine = jobs.now - max(0.0, jobs.wall - record.finished)
        item.dropped = was_dropped(record)
        jobs.keep(item)
    elif state is not State.WAITING:
        jobs.move(item, record.due, item.due_machine)
    return True
