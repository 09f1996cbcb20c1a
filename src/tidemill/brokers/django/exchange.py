"""One exchange of an owner, as one transaction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step, Want, lost
from tidemill.brokers.django import history
from tidemill.brokers.django.claim import asking_queues, lease, next_opening, read_ahead
from tidemill.brokers.django.dialects import Statement
from tidemill.brokers.django.due import next_due, prune
from tidemill.brokers.django.jobs import StoredJobs, decode_facts
from tidemill.brokers.django.rows import SELECT
from tidemill.brokers.django.schedules import NEXT_SCHEDULE, StoredSchedules, seconds_until
from tidemill.brokers.django.tables import Rows, select_in
from tidemill.brokers.rules.settle import note, settle, touch
from tidemill.brokers.rules.workflows import inputs_of
from tidemill.core.envelope import encode_envelope
from tidemill.core.job import Command, Lease, Owner

_encode = msgspec.msgpack.Encoder().encode
_commands = msgspec.msgpack.Decoder(list[Command])


class Kept(msgspec.Struct, array_like=True):
    """The parts of the last reply to an owner that a repeated step needs."""

    settled: list[bool] = []
    touched: list[bool] = []
    leases: list[Lease] = []
    commands: list[Command] = []


_kept = msgspec.msgpack.Decoder(Kept)


class OwnerRow(msgspec.Struct):
    until: float
    serial: int
    commands: list[Command]
    reply: bytes


def _asking_owner(owner_id: str) -> Statement:
    text = 'SELECT "until", serial, commands, reply FROM tidemill_owner WHERE id = %s'
    return text, [owner_id]


def _owner_of(found: Sequence[Any]) -> OwnerRow | None:
    """The row of an owner; None when the owner was given up."""
    if not found:
        return None
    until, serial, commands, reply = found[0]
    raw = bytes(commands)
    return OwnerRow(until, serial, _commands.decode(raw) if raw else [], bytes(reply))


def first_reads(step: Step) -> list[Statement]:
    """The queries that an exchange makes when its transaction begins: see :func:`exchange`."""
    tokens = [verdict.token for verdict in step.verdicts]
    tokens += [note.token for note in step.notes]
    tokens += [token for token, _ in step.touch]
    asking_tokens = select_in(SELECT + "token > 0 AND token IN", set(tokens))
    schedule = NEXT_SCHEDULE if step.fires else ("SELECT NULL", ())
    return [_asking_owner(step.owner), asking_queues(step.want), schedule, *asking_tokens]


def exchange(jobs: StoredJobs, owner: Owner, step: Step, serial: int, alive: float) -> Reply:
    """Make one step. ``alive`` is the length of the owner's lease in seconds."""
    # Most steps send two messages to read rows. The first begins the transaction
    # (:func:`first_reads`). The second comes before the verdicts are settled
    # (:func:`~.claim.read_ahead`). More messages follow if verdicts or jobs need further rows.
    want = step.want
    found_owner, queue_names, schedule, *running = jobs.also
    row = _owner_of(found_owner)
    if row is None:
        return lost(step)
    if serial == row.serial:
        return _repeated(jobs, owner, row)
    held = [jobs.enter_row(one) for found in running for one in found]
    queues = None if jobs.is_late else [name for (name,) in queue_names]
    read_ahead(jobs, held, step, queues)
    jobs.need_beside(held)
    reply = Reply()
    _hand_in(jobs, owner, step, reply)
    if want is not None and jobs.departure is None:
        reply.leases = lease(jobs, owner, want, queues)
    reply.commands = row.commands
    if jobs.departure is not None and want is not None and want.count:
        reply.commands = [*row.commands, Command("quiet")]
    if jobs.prune is not None and jobs.prune <= jobs.now:
        prune(jobs)
    opening = next_opening(jobs)
    jobs.flush()
    reply.next_due = min(next_due(jobs), max(0.0, opening))
    _hand_out_schedules(jobs, step.fires, schedule, reply)
    _keep(jobs, owner, serial, reply, alive)
    return reply


def _hand_in(jobs: StoredJobs, owner: Owner, step: Step, reply: Reply) -> None:
    """Store notes, settle verdicts, and renew leases of messages."""
    followers = [job for verdict in step.verdicts for job in verdict.followers]
    jobs.need_ids([job.id for job in followers])
    jobs.need_ids([i for job in followers if job.links for i in job.links.next])
    for one in step.notes:
        note(jobs, owner.id, one)
    reply.settled = [settle(jobs, owner.id, verdict) for verdict in step.verdicts]
    history.add(jobs, step.history)
    reply.touched = [touch(jobs, owner.id, token, secs) for token, secs in step.touch]


def _hand_out_schedules(jobs: StoredJobs, most: int, found: Sequence[Any], reply: Reply) -> None:
    if most and jobs.departure is None:
        due = seconds_until(found, jobs.now)
        if due <= 0:
            schedules = StoredSchedules(jobs)
            reply.schedules = schedules.hand_out(most)
            due = schedules.next_due()
        reply.next_due = min(reply.next_due, due)


def renew(jobs: StoredJobs, owner: str, alive: float) -> None:
    """Renew the lease of an owner whose step must wait while many due jobs are moved."""
    text = 'UPDATE tidemill_owner SET "until" = %s WHERE id = %s'
    jobs.rows.send(text, [jobs.now + alive, owner])


def _keep(jobs: StoredJobs, owner: Owner, serial: int, reply: Reply, alive: float) -> None:
    """Renew the owner's lease, and keep the reply, which may be lost on its way."""
    slim = [msgspec.structs.replace(one, envelope=b"", inputs=()) for one in reply.leases]
    kept = Kept(reply.settled, reply.touched, slim, reply.commands)
    jobs.rows.send(
        'UPDATE tidemill_owner SET "until" = %s, serial = %s, commands = %s, reply = %s '
        "WHERE id = %s",
        [jobs.now + alive, serial, b"", _encode(kept), owner.id],
    )


def _repeated(jobs: StoredJobs, owner: Owner, row: OwnerRow) -> Reply:
    """Answer a repeated step with the leases that the owner still holds."""
    kept = _kept.decode(row.reply)
    jobs.need_holder(owner.id)
    leases = []
    for one in kept.leases:
        item = jobs.leases.get((owner.id, one.token))
        if item is not None:
            whole = encode_envelope(item.record.envelope), inputs_of(jobs, item)
            leases.append(msgspec.structs.replace(one, envelope=whole[0], inputs=whole[1]))
    return Reply(kept.settled, kept.touched, leases, kept.commands, next_due=0.0)


_FACTS = "SELECT {now}, facts FROM tidemill_store WHERE id = 1"
_TIMES = (
    "SELECT (SELECT min(alarm) FROM tidemill_job WHERE alarm IS NOT NULL), "
    "(SELECT min(prune) FROM tidemill_job WHERE prune IS NOT NULL)"
)


def has_nothing(rows: Rows, step: Step, alive: float) -> Reply | None:
    """The reply to a step that finds no work, read without a lock; None when a step is needed."""
    if step.verdicts or step.touch or step.notes or step.history:
        return None
    facts_now = _FACTS.format(now=rows.dialect.now or "0"), ()
    ready = _asking_ready(step.want)
    asked = [facts_now, _asking_owner(step.owner), (_TIMES, ()), NEXT_SCHEDULE, *ready]
    opened, owner, [times], schedule, *found = rows.execute_all(asked)
    if not opened:  # ``flush`` has emptied the tables
        return None
    [(now, raw)] = opened
    row, facts, now = _owner_of(owner), decode_facts(bytes(raw)), rows.time_of(now)
    if row is None or row.commands or row.until - now < alive * 2 / 3:
        return None
    if facts.departure is not None:
        return None
    if any(found) or (ready and facts.has_limits):
        return None
    alarm, pruned = (math.inf if time is None else time for time in times)
    due = min(alarm - now, seconds_until(schedule, now)) if step.fires else alarm - now
    if min(due, pruned - now) <= 0:
        return None
    return Reply(next_due=due)


def _asking_ready(want: Want | None) -> list[Statement]:
    """The statement that looks for a ready job; none when no job is wanted."""
    if want is None or not want.count:
        return []
    where, parameters = "state = 2 AND state <= 3", list[Any]()
    if want.queues:
        where += f" AND queue IN ({', '.join(['%s'] * len(want.queues))})"
        parameters += want.queues
    if not (want.tasks and want.messages):
        where += " AND kind = 1" if want.messages else " AND kind <> 1"
    return [(f"SELECT 1 FROM tidemill_job WHERE {where} LIMIT 1", parameters)]
