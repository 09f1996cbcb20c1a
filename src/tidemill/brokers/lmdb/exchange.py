"""One exchange: an owner reports on its leases and gets new leases, in one commit."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.contract.early_leases import LeaseCallback
from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want, lost
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.lmdb import schedules
from tidemill.brokers.lmdb.claim import Leasing
from tidemill.brokers.lmdb.due import come_due, prune
from tidemill.brokers.lmdb.handoff import fetch, terms_of
from tidemill.brokers.lmdb.history import add_history
from tidemill.brokers.lmdb.layout import MICRO
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
from tidemill.brokers.lmdb.wakeup import ALL, MESSAGES, TASKS, bloom, digest
from tidemill.brokers.lmdb.workflows import flow
from tidemill.core.job import Verdict
from tidemill.core.owner import Command

FRESH = 10
"""An owner's sign of life is written again only after a tenth (1 / ``FRESH``) of its lease."""


def exchange(
    commit: Transitions, local_owner: LocalOwner, step: Step, heard: LeaseCallback | None = None
) -> Reply:
    """Store notes, settle, touch, lease; then settle the verdicts that ``heard`` returns."""
    number = local_owner.number
    local_owner.near = local_owner.near or not step.serial
    if not is_listed(commit, number):
        reply = lost(step)
        reply.settled += [False for _ in heard(())] if heard else []
        return reply
    if step.serial or local_owner.owner.lease:
        return _hear_remote(commit, local_owner, step)
    return _exchange(commit, local_owner, step, heard)


def hear_behalf(commit: Transitions, step: Step) -> Reply:
    """Apply a report of another process for a remote owner, which still makes its own steps."""
    reply = Reply()
    for number, owner in owner_rows(commit.txn, commit.t):
        if owner.id == step.owner and owner.lease:
            come_due(commit)
            _hear(commit, number, owner.name, step, reply)
            prune(commit, 2 * len(step.verdicts) + 2)
            return reply
    return lost(step)


def _hear_remote(commit: Transitions, local_owner: LocalOwner, step: Step) -> Reply:
    """Answer the step of a remote owner; the owner may repeat a step that was answered."""
    number, last = local_owner.number, read_last_reply(commit, local_owner.number)
    if 0 < step.serial <= last.serial:
        return repeat(commit, number, step, last)
    local_owner.told = last.told
    # An owner without a want does not sleep in this process, but maybe in another one.
    slot = last.slot if step.want is None else local_owner.sleeper.slot
    if last.slot not in (0, slot):  # the owner's last step came through another process
        commit.store.wakeups.unmark(last.slot, number)
    found = strays(commit, number, step.held)
    reply = _exchange(commit, local_owner, step)
    reply.strays, reply.behind = found, last.serial < step.serial - 1
    if not step.serial and last.slot == slot and not _is_news(reply):
        fresh = last.at + int(local_owner.owner.lease * MICRO) // FRESH
        if commit.now < fresh:
            # A step without a serial is not repeated, so its reply need not be stored.
            return reply
    now = LastReply(0, step.serial or last.serial, last.told, commit.last_number, slot)
    now.settled, now.touched = reply.settled, reply.touched
    now.commands = reply.commands
    keep_last_reply(commit, number, now)
    return reply


def _is_news(reply: Reply) -> bool:
    """True when the step has changed something, or brings something for the owner."""
    return bool(reply.leases or reply.settled or reply.touched or reply.commands)


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
    if step.want:
        _claim(commit, local_owner, step.want, departure, reply)
    if heard is not None:
        _settle(commit, number, local_owner.owner.name, heard(reply.leases), reply)
    if reply.settled:
        prune(commit, 2 * len(reply.settled) + 2)
    reply.commands += take_commands(commit, number)
    if departure is None or not departure.sealed:
        reply.next_due = 0.0 if more else max(0.0, min(reply.next_due, commit.next_due()))
    _hand_out(commit, step.fires if departure is None else 0, reply)
    if step.want:
        _mark(commit, local_owner, step.want, reply)
    commit.tells(local_owner)
    return reply


def _hear(commit: Transitions, number: int, worker: str, step: Step, reply: Reply) -> None:
    """Apply an owner's report on its leases: notes, verdicts and touches."""
    for each in step.notes:
        note(commit, number, each)
    _settle(commit, number, worker, step.verdicts, reply)
    add_history(commit, step.history)
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
    """Lease jobs to the owner; none while the jobs move to another store."""
    if departure is not None and want.count:
        if local_owner.owner.kind == "consumer":
            raise gone(departure)
        reply.commands.append(Command("quiet"))
    elif want.count:
        _lease(commit, local_owner, want, reply)
    elif want.tasks or want.messages:
        commit.ring_rest(want.queues)  # this owner cannot use its hint: pass the hint on


def _lease(commit: Transitions, local_owner: LocalOwner, want: Want, reply: Reply) -> None:
    deadlines = local_owner.owner.kind == "consumer"
    leasing = Leasing(commit, local_owner.number, deadlines=deadlines, leases=reply.leases)
    if want.tasks or want.messages:
        leasing.take(want, local_owner.last_queue)
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
    """Mark the owner as about to sleep, unless the reply has something for the owner."""
    wakeups = commit.store.wakeups
    if want.sleep and len(reply.leases) < want.count:  # the owner could take more jobs
        kinds = (TASKS if want.tasks else 0) | (MESSAGES if want.messages else 0)
        bits = bloom(want.queues) if want.queues else ALL
        endless = reply.next_due == float("inf")
        until = ALL if endless else commit.now + int(reply.next_due * MICRO)
        only = digest(want.queues[0]) if len(want.queues) == 1 else 0
        terms = terms_of(commit, local_owner, want, len(reply.leases))
        wakeups.mark(local_owner.sleeper, kinds, bits, until, only, terms)
        # A sleeper that takes jobs wakes at the next due time, so no other sleeper has to.
        commit.untimed = commit.untimed and not kinds & (TASKS | MESSAGES)
    else:
        wakeups.mark(local_owner.sleeper, 0, 0)
        commit.untimed = True
