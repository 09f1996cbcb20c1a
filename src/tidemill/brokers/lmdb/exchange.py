"""One exchange: an owner reports on its leases and gets new leases, in one commit."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.contract.early_leases import LeaseCallback
from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want, lost
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.lmdb import schedules
from tidemill.brokers.lmdb.carrier import take
from tidemill.brokers.lmdb.claim import Leasing
from tidemill.brokers.lmdb.due import come_due, prune
from tidemill.brokers.lmdb.handoff import fetch, terms_of
from tidemill.brokers.lmdb.layout import LEASE_KEY, MICRO
from tidemill.brokers.lmdb.owner_table import is_listed, owner_rows, take_commands
from tidemill.brokers.lmdb.owners import LocalOwner
from tidemill.brokers.lmdb.reply_cache import (
    LastReply,
    keep_last_reply,
    read_last_reply,
    repeat,
    strays,
)
from tidemill.brokers.lmdb.settle import note, settle, touch
from tidemill.brokers.lmdb.transfer import departure_of, gone
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.lmdb.unknown_tasks import bring_back, lend, tell, undo
from tidemill.brokers.lmdb.wakeup import ALL, MESSAGES, TASKS, UNKNOWN, bloom, digest
from tidemill.brokers.lmdb.workflows import flow
from tidemill.core.job import RELAY, Command, Outcome, Verdict

__all__ = ["exchange", "hear_behalf"]

FRESH = 10
"""An owner's word is not written again within a tenth (1 / ``FRESH``) of its lease."""


def exchange(
    commit: Transitions, local_owner: LocalOwner, step: Step, heard: LeaseCallback | None = None
) -> Reply:
    """Note, settle, touch, take and lease, in that order; then settle the answer of ``heard``."""
    number = local_owner.number
    local_owner.near = local_owner.near or not step.serial
    if not is_listed(commit, number):
        reply = lost(step)
        reply.settled += [False for _ in heard(())] if heard else []
        return reply
    if step.serial or local_owner.owner.lease:
        return _hear_elsewhere(commit, local_owner, step)
    return _exchange(commit, local_owner, step, heard)


def hear_behalf(commit: Transitions, step: Step) -> Reply:
    """Apply a report made on behalf of a remote owner, whose own steps go on."""
    reply = Reply()
    for number, owner in owner_rows(commit.txn, commit.t):
        if owner.id == step.owner and owner.lease:
            come_due(commit)
            _hear(commit, number, owner.name, step, reply)
            prune(commit, 2 * len(step.verdicts) + 2)
            return reply
    return lost(step)


def _hear_elsewhere(commit: Transitions, local_owner: LocalOwner, step: Step) -> Reply:
    """Answer the step of a remote owner; the owner may repeat a step that was answered."""
    number, said = local_owner.number, read_last_reply(commit, local_owner.number)
    if 0 < step.serial <= said.serial:
        return repeat(commit, number, step, said)
    local_owner.told = said.told
    # An owner without a want does not sleep here: by now it may sleep in another process.
    slot = said.slot if step.want is None else local_owner.sleeper.slot
    if said.slot not in (0, slot):  # its last step came through another process
        commit.store.wakeups.unmark(said.slot, number)
    found = strays(commit, number, step.held)
    reply = _exchange(commit, local_owner, step)
    reply.strays, reply.behind = found, said.serial < step.serial - 1
    if not step.serial and said.slot == slot and not _is_news(reply):
        fresh = said.at + int(local_owner.owner.lease * MICRO) // FRESH
        if commit.now < fresh:
            return reply  # a step without a serial is not repeated: not worth a commit
    now = LastReply(0, step.serial or said.serial, said.told, commit.last_number, slot)
    now.settled, now.touched, now.taken = reply.settled, reply.touched, reply.taken
    now.commands = reply.commands
    keep_last_reply(commit, number, now)
    return reply


def _is_news(reply: Reply) -> bool:
    """Whether a reply tells of anything that was done."""
    return bool(reply.leases or reply.settled or reply.touched or reply.taken or reply.commands)


def _exchange(
    commit: Transitions, local_owner: LocalOwner, step: Step, heard: LeaseCallback | None = None
) -> Reply:
    number = local_owner.number
    reply = Reply()
    more = come_due(commit)
    _hear(commit, number, local_owner.owner.name, step, reply)
    departure = departure_of(commit)
    if local_owner.owner.kind == "worker":
        reply.leases = fetch(commit, local_owner, step.want if departure is None else None)
    if step.take:  # after the fetch of jobs handed over while it slept: they have the newest tokens
        _hand_over(commit, step.take)
        reply.taken = take(
            commit, number, step.take, deadlines=local_owner.owner.kind == "consumer"
        )
        if commit.ended:
            flow(commit)
    if step.want:
        _claim(commit, local_owner, step.want, departure, reply)
    if heard is not None:
        _settle(commit, number, local_owner.owner.name, heard(reply.leases), reply)
    if reply.settled:
        prune(commit, 2 * len(reply.settled) + 2)
    reply.commands += take_commands(commit, number)
    if departure is None or not departure.sealed:
        reply.next_due = 0.0 if more else max(0.0, min(reply.next_due, commit.next_due()))
    if step.want:
        tell(commit, step.want, reply)
    _hand_out(commit, step.fires if departure is None else 0, reply)
    if step.want:
        _mark(commit, local_owner, step.want, reply)
    commit.tells(local_owner)
    return reply


def _hand_over(commit: Transitions, wanted: Sequence[tuple[int, str]]) -> None:
    """Give the carrier the wanted jobs that relays have published and still hold."""
    rows = owner_rows(commit.txn, commit.t)
    for relay in [number for number, owner in rows if owner.kind == RELAY]:
        for token, _ in wanted:
            if commit.txn.get(LEASE_KEY.pack(relay, token), db=commit.t.lease) is not None:
                settle(commit, relay, "", Verdict(token, Outcome.CARRY))


def _hear(commit: Transitions, number: int, worker: str, step: Step, reply: Reply) -> None:
    """Apply an owner's report on its leases: notes, verdicts and touches."""
    for said in step.notes:
        note(commit, number, said)
    _settle(commit, number, worker, step.verdicts, reply)
    if step.touch:
        reply.touched = [touch(commit, number, token, seconds) for token, seconds in step.touch]


def _settle(
    commit: Transitions, number: int, worker: str, verdicts: Sequence[Verdict], reply: Reply
) -> None:
    reply.settled += [settle(commit, number, worker, verdict) for verdict in verdicts]
    if commit.ended:
        flow(commit)


def _claim(
    commit: Transitions,
    local_owner: LocalOwner,
    want: Want,
    departure: Departure | None,
    reply: Reply,
) -> None:
    """Lease jobs to the owner; a store that has departed leases none."""
    if departure is not None and want.count:
        if local_owner.owner.kind == "consumer":
            raise gone(departure)
        reply.commands.append(Command("quiet"))
    elif want.count:
        _lease(commit, local_owner, want, reply)
    elif want.tasks or want.messages:
        commit.ring_rest(want.queues)  # pass on a hint that this owner cannot follow


def _lease(commit: Transitions, local_owner: LocalOwner, want: Want, reply: Reply) -> None:
    deadlines = local_owner.owner.kind == "consumer"
    leasing = Leasing(commit, local_owner.number, deadlines=deadlines, leases=reply.leases)
    back = bring_back(commit, want, want.count - len(reply.leases)) if want.knows else []
    if back and not want.tasks:
        lend(commit, leasing, back, want.count)
    if want.tasks or want.messages:
        leasing.take(want, local_owner.last_queue)
    if back:
        undo(commit, want, back)
    if want.mode is Mode.FAIR:
        local_owner.last_queue = leasing.last_queue
    if len(reply.leases) == want.count:
        commit.ring_rest(want.queues)


def _hand_out(commit: Transitions, fires: int, reply: Reply) -> None:
    """Hand due schedules to an owner that fires schedules."""
    if fires:
        reply.schedules = schedules.hand_out(commit, fires)
        reply.next_due = min(reply.next_due, schedules.next_due(commit))


def _mark(commit: Transitions, local_owner: LocalOwner, want: Want, reply: Reply) -> None:
    """Mark the owner as about to sleep, unless it has something to do."""
    wakeups = commit.store.wakeups
    if want.sleep and len(reply.leases) < want.count:  # it has room for what comes next
        kinds = (TASKS if want.tasks else 0) | (MESSAGES if want.messages else 0)
        if want.told >= 0 and (want.knows or not want.tasks):
            kinds |= UNKNOWN
        bits = bloom(want.queues) if want.queues else ALL
        endless = reply.next_due == float("inf")
        until = ALL if endless else commit.now + int(reply.next_due * MICRO)
        only = digest(want.queues[0]) if len(want.queues) == 1 else 0
        terms = terms_of(commit, local_owner, want, len(reply.leases))
        wakeups.mark(local_owner.sleeper, kinds, bits, until, only, terms)
        commit.untimed = commit.untimed and not kinds & (TASKS | MESSAGES)  # else it keeps time
    else:
        wakeups.mark(local_owner.sleeper, 0, 0)
        commit.untimed = True
