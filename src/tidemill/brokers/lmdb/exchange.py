"""One exchange: what an owner hands in and takes, in one commit."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.base import Mode, Reply, Step, Want
from tidemill.brokers.limiting import GRACE
from tidemill.brokers.lmdb import schedules
from tidemill.brokers.lmdb.carrying import take
from tidemill.brokers.lmdb.flows import flow
from tidemill.brokers.lmdb.handoff import fetch, terms_of
from tidemill.brokers.lmdb.layout import LEASE_KEY, MICRO
from tidemill.brokers.lmdb.leases import Leasing
from tidemill.brokers.lmdb.members import Member
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.moving import departure_of, gone
from tidemill.brokers.lmdb.roster import is_listed, owner_rows, take_commands
from tidemill.brokers.lmdb.timers import come_due, prune
from tidemill.brokers.lmdb.verdicts import note, settle, touch
from tidemill.brokers.lmdb.wake import ALL, MESSAGES, TASKS, bloom, digest
from tidemill.job import RELAY, Command, Outcome, Verdict

__all__ = ["exchange"]


def exchange(moves: Moves, member: Member, step: Step) -> Reply:
    """Note, settle, touch, take and lease, in that order."""
    number = member.number
    if not is_listed(moves, number):
        return _given_up(step)
    reply = Reply()
    more = come_due(moves)
    _hear(moves, member, step, reply)
    departure = departure_of(moves)
    if member.owner.kind == "worker":
        reply.leases = fetch(moves, member, step.want if departure is None else None)
    if step.take:  # after what was handed over while it slept, which has the newest tokens
        _hand_over(moves, step.take)
        reply.taken = take(moves, number, step.take, deadlines=member.owner.kind == "consumer")
        if moves.ended:
            flow(moves)
    if departure is not None and step.want and step.want.count:
        if member.owner.kind == "consumer":
            raise gone(departure)
        reply.commands.append(Command("quiet"))
    elif step.want and step.want.count:
        _lease(moves, member, step.want, reply)
    elif step.want:
        moves.ring_rest(step.want.queues)  # a hint it was given and cannot follow
    if step.verdicts:
        prune(moves, 2 * len(step.verdicts) + 2)
    reply.commands += take_commands(moves, number)
    if departure is None or not departure.sealed:
        reply.next_due = 0.0 if more else max(0.0, min(reply.next_due, moves.next_due()))
    _hand_out(moves, step.fires if departure is None else 0, reply)
    if step.want:
        _mark(moves, member, step.want, reply)
    moves.tells(member)
    return reply


def _hand_over(moves: Moves, wanted: Sequence[tuple[int, str]]) -> None:
    """What relays have published and not handed over yet goes to the carrier now."""
    rows = owner_rows(moves.txn, moves.t)
    for relay in [number for number, owner in rows if owner.kind == RELAY]:
        for token, _ in wanted:
            if moves.txn.get(LEASE_KEY.pack(relay, token), db=moves.t.lease) is not None:
                settle(moves, relay, "", Verdict(token, Outcome.CARRY))


def _hear(moves: Moves, member: Member, step: Step, reply: Reply) -> None:
    """What it says of what it has."""
    number = member.number
    for said in step.notes:
        note(moves, number, said)
    if step.verdicts:
        worker = member.owner.name
        reply.settled = [settle(moves, number, worker, verdict) for verdict in step.verdicts]
        if moves.ended:
            flow(moves)
    if step.touch:
        reply.touched = [touch(moves, number, token, seconds) for token, seconds in step.touch]


def _given_up(step: Step) -> Reply:
    """The owner was given up for dead: all it held is lost, and it is told so."""
    lost = [False] * len(step.verdicts), [False] * len(step.touch)
    return Reply(*lost, commands=[Command("lost")], next_due=0.0)


def _lease(moves: Moves, member: Member, want: Want, reply: Reply) -> None:
    deadlines = member.owner.kind == "consumer"
    leasing = Leasing(moves, member.number, deadlines=deadlines, leases=reply.leases)
    leasing.take(want, member.last_queue)
    if want.mode is Mode.FAIR:
        member.last_queue = leasing.last_queue
    if len(reply.leases) == want.count:
        moves.ring_rest(want.queues)
    if leasing.left_place:
        reply.next_due = GRACE


def _hand_out(moves: Moves, fires: int, reply: Reply) -> None:
    """Schedules that are due, to an owner that sees to them."""
    if fires:
        reply.schedules = schedules.hand_out(moves, fires)
        reply.next_due = min(reply.next_due, schedules.next_due(moves))


def _mark(moves: Moves, member: Member, want: Want, reply: Reply) -> None:
    """Say that the owner is about to sleep, unless it has something to do."""
    bells = moves.store.bells
    if want.sleep and len(reply.leases) < want.count:  # it has room for what comes next
        kinds = (TASKS if want.tasks else 0) | (MESSAGES if want.messages else 0)
        bits = bloom(want.queues) if want.queues else ALL
        endless = reply.next_due == float("inf")
        until = ALL if endless else moves.now + int(reply.next_due * MICRO)
        only = digest(want.queues[0]) if len(want.queues) == 1 else 0
        terms = terms_of(moves, member, want, len(reply.leases))
        bells.mark(member.sleeper, kinds, bits, until, only, terms)
        moves.untimed = False  # it sees to all that is due
    else:
        bells.mark(member.sleeper, 0, 0)
        moves.untimed = True
