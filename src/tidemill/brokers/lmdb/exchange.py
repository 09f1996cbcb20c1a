"""One exchange: what an owner hands in and takes, in one commit."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.base import Mode, Reply, Step, Want
from tidemill.brokers.early import Heard
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
from tidemill.brokers.lmdb.said import Said, keep_said, read_said, repeat, strays
from tidemill.brokers.lmdb.timers import come_due, prune
from tidemill.brokers.lmdb.unknown import bring_back, lend, tell, undo
from tidemill.brokers.lmdb.verdicts import note, settle, touch
from tidemill.brokers.lmdb.wake import ALL, MESSAGES, TASKS, UNKNOWN, bloom, digest
from tidemill.brokers.steps import lost
from tidemill.job import RELAY, Command, Outcome, Verdict

__all__ = ["exchange", "hear_behalf"]

FRESH = 10
"""In such a part of its lease an owner's word need not be written down again."""


def exchange(moves: Moves, member: Member, step: Step, heard: Heard | None = None) -> Reply:
    """Note, settle, touch, take and lease, in that order; and settle what is ``heard`` then."""
    number = member.number
    member.near = member.near or not step.serial
    if not is_listed(moves, number):
        reply = lost(step)
        reply.settled += [False for _ in heard(())] if heard else []
        return reply
    if step.serial or member.owner.lease:
        return _hear_elsewhere(moves, member, step)
    return _exchange(moves, member, step, heard)


def hear_behalf(moves: Moves, step: Step) -> Reply:
    """What somebody says on behalf of an owner elsewhere, whose own words go on."""
    reply = Reply()
    for number, owner in owner_rows(moves.txn, moves.t):
        if owner.id == step.owner and owner.lease:
            come_due(moves)
            _hear(moves, number, owner.name, step, reply)
            prune(moves, 2 * len(step.verdicts) + 2)
            return reply
    return lost(step)


def _hear_elsewhere(moves: Moves, member: Member, step: Step) -> Reply:
    """The word of an owner elsewhere, which may be one that was answered before."""
    number, said = member.number, read_said(moves, member.number)
    if 0 < step.serial <= said.serial:
        return repeat(moves, number, step, said)
    member.told = said.told
    # Who wants nothing does not mean to sleep here: it may be asleep in another process by now.
    slot = said.slot if step.want is None else member.sleeper.slot
    if said.slot not in (0, slot):  # it spoke through another process before
        moves.store.bells.unmark(said.slot, number)
    found = strays(moves, number, step.held)
    reply = _exchange(moves, member, step)
    reply.strays, reply.behind = found, said.serial < step.serial - 1
    if not step.serial and said.slot == slot and not _is_news(reply):
        fresh = said.at + int(member.owner.lease * MICRO) // FRESH
        if moves.now < fresh:
            return reply  # nobody will ask for it again: not worth a commit
    now = Said(0, step.serial or said.serial, said.told, moves.last_number, slot)
    now.settled, now.touched, now.taken = reply.settled, reply.touched, reply.taken
    now.commands = reply.commands
    keep_said(moves, number, now)
    return reply


def _is_news(reply: Reply) -> bool:
    """Whether an answer says of anything that was done."""
    return bool(reply.leases or reply.settled or reply.touched or reply.taken or reply.commands)


def _exchange(moves: Moves, member: Member, step: Step, heard: Heard | None = None) -> Reply:
    number = member.number
    reply = Reply()
    more = come_due(moves)
    _hear(moves, number, member.owner.name, step, reply)
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
    elif step.want and (step.want.tasks or step.want.messages):
        moves.ring_rest(step.want.queues)  # a hint it was given and cannot follow
    if heard is not None:
        _settle(moves, number, member.owner.name, heard(reply.leases), reply)
    if reply.settled:
        prune(moves, 2 * len(reply.settled) + 2)
    reply.commands += take_commands(moves, number)
    if departure is None or not departure.sealed:
        reply.next_due = 0.0 if more else max(0.0, min(reply.next_due, moves.next_due()))
    if step.want:
        tell(moves, step.want, reply)
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


def _hear(moves: Moves, number: int, worker: str, step: Step, reply: Reply) -> None:
    """What it says of what it has."""
    for said in step.notes:
        note(moves, number, said)
    _settle(moves, number, worker, step.verdicts, reply)
    if step.touch:
        reply.touched = [touch(moves, number, token, seconds) for token, seconds in step.touch]


def _settle(
    moves: Moves, number: int, worker: str, verdicts: Sequence[Verdict], reply: Reply
) -> None:
    reply.settled += [settle(moves, number, worker, verdict) for verdict in verdicts]
    if moves.ended:
        flow(moves)


def _lease(moves: Moves, member: Member, want: Want, reply: Reply) -> None:
    deadlines = member.owner.kind == "consumer"
    leasing = Leasing(moves, member.number, deadlines=deadlines, leases=reply.leases)
    back = bring_back(moves, want, want.count - len(reply.leases)) if want.knows else []
    if back and not want.tasks:
        lend(moves, leasing, back, want.count)
    if want.tasks or want.messages:
        leasing.take(want, member.last_queue)
    if back:
        undo(moves, want, back)
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
        if want.told >= 0 and (want.knows or not want.tasks):
            kinds |= UNKNOWN
        bits = bloom(want.queues) if want.queues else ALL
        endless = reply.next_due == float("inf")
        until = ALL if endless else moves.now + int(reply.next_due * MICRO)
        only = digest(want.queues[0]) if len(want.queues) == 1 else 0
        terms = terms_of(moves, member, want, len(reply.leases))
        bells.mark(member.sleeper, kinds, bits, until, only, terms)
        moves.untimed = moves.untimed and not kinds & (TASKS | MESSAGES)  # else it sees to it
    else:
        bells.mark(member.sleeper, 0, 0)
        moves.untimed = True
