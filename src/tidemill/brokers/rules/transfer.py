"""Move all jobs to another store, and adopt all jobs of another store."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidemill.brokers.contract.dependencies import was_dropped
from tidemill.brokers.contract.schedules import Change, Schedule
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.rules.limits import declare
from tidemill.brokers.rules.schedules import ScheduleTable
from tidemill.brokers.rules.transitions import Item, Jobs, store_moved
from tidemill.core.clock import new_id
from tidemill.core.job import Record, State


def depart(jobs: Jobs, where: str, *, seal: bool = False) -> Departure:
    known = jobs.departure or Departure(new_id(), where)
    if known.where != where:
        raise store_moved(known)
    sealed = known.sealed or seal
    jobs.departure = Departure(known.mark, where, jobs.seq, sealed)
    return jobs.departure


def adopt(jobs: Jobs, departure: Departure, records: Sequence[Record], cursor: str) -> list[bool]:
    _, first = jobs.arrivals.get(departure.mark, ("", jobs.seq))
    jobs.seq = max(jobs.seq, first + departure.last)
    jobs.arrivals[departure.mark] = cursor, first
    return [_adopt_one(jobs, record, first) for record in records]


def adopt_schedules(table: ScheduleTable, schedules: Sequence[Schedule]) -> list[bool]:
    """Adopt the schedules of a departed store whose names are free."""
    new = [Change(one.name, 0, one.due, one.body) for one in schedules]
    return [changed.done for changed in table.change(new)]


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
        if envelope.links:
            jobs.keep_linked(item, jobs.retention.protect)  # its dependents move after it
        else:
            jobs.keep_plainly(item)
    elif state is not State.WAITING:
        jobs.move(item, record.due, item.due_machine)
    return True
