"""One exchange: an owner reports on its leases and gets new leases, in one commit.

*Direct hand-off* means that a put leases its jobs to a sleeping worker, in its own commit, by the
want that the worker left when it went to sleep (``docs/design/lmdb.md``). The sleeper gets a hint,
and finds leases with tokens higher than all tokens that it knows. Jobs that it can no longer use go
back. Messages are never handed over: their ttr would begin before anybody knows of the lease.
"""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from tidemill.brokers.contract.early_leases import LeaseCallback
from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want, lost
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.lmdb.claim.claim import Leasing
from tidemill.brokers.lmdb.claim.due import come_due, prune
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.brokers.lmdb.engine.wakeup import (
    ALL,
    MESSAGES,
    NOTHING,
    TASKS,
    SleeperWant,
    bloom,
    digest,
)
from tidemill.brokers.lmdb.layout import LEASE_KEY, LEASE_VALUE, MICRO, tokens_of
from tidemill.brokers.lmdb.look.history import add_history
from tidemill.brokers.lmdb.owner_table import (
    LastReply,
    is_listed,
    keep_last_reply,
    open_lease,
    owner_rows,
    read_last_reply,
    repeat,
    strays,
    take_commands,
)
from tidemill.brokers.lmdb.owners import LocalOwner
from tidemill.brokers.lmdb.put import schedules
from tidemill.brokers.lmdb.put.workflows import flow
from tidemill.brokers.lmdb.record import Flag, Stored
from tidemill.brokers.lmdb.settle import note, settle, settle_all, touch
from tidemill.brokers.lmdb.transfer import gone
from tidemill.brokers.lmdb.transitions import Transitions, departure_in
from tidemill.core.crash_points import point
from tidemill.core.job import NOT_STARTED, Command, Lease, Outcome, Verdict
from tidemill.core.signals import SignalsDeferred
from tidemill.core.verdicts import is_given_back

FRESH = 10  # an owner's sign of life is written again after a tenth of its lease only


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
    departure = commit.departure
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
        again = [v for v in step.verdicts if v.outcome == Outcome.SNOOZE and is_given_back(v)]
        if again and reply.next_due < float("inf"):
            # Else only this owner, which does not know the task, would wake when the job is due.
            commit.store.wakeups.tell_time(commit.now + int(reply.next_due * MICRO))
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
    reply.settled += settle_all(commit, number, worker, verdicts)
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


# -- direct hand-off -----------------------------------------------------------------------------


_MODES = tuple(Mode)


def terms_of(commit: Transitions, local_owner: LocalOwner, want: Want, taken: int) -> SleeperWant:
    """The want by which a writer may lease to a sleeping owner that takes only tasks."""
    local_owner.asked = want
    if local_owner.owner.kind != "worker" or want.messages or local_owner.owner.lease:
        return NOTHING  # no hand-off: a remote owner may die unnoticed with the jobs
    rows = [row for name in want.queues if (row := commit.existing_row(name))]
    numbers = tuple(row.number for row in rows) if want.queues else None
    return SleeperWant(want.count - taken, _MODES.index(want.mode), numbers)


def hand_over(commit: Transitions, lines: list[int], owner: int, terms: SleeperWant) -> int:
    """Lease jobs to a sleeper, by the want that the sleeper left; return their number."""
    # ``lines`` are the lines that got a job: only these may have a job for a sleeper.
    room, mode, queues = terms
    if not room or queues == () or not is_listed(commit, owner):
        return 0
    leasing = Leasing(commit, owner, deadlines=False)
    if len(lines) > 1:
        names = tuple(commit.row_of(number * 2).name for number in queues or ())
        leasing.take(Want(room, names, _MODES[mode], alone=False), 0)
    else:
        row = commit.row_of(lines[0])
        if not row.paused and (queues is None or row.number in queues):
            leasing.take_line(row.lines[0], room)
    flow(commit)  # the leasing has ended expired jobs
    point("store.handed")
    return len(leasing.leases)


def fetch(commit: Transitions, local_owner: LocalOwner, want: Want | None) -> list[Lease]:
    """The leases made for the owner while it slept; leases that it does not want go back."""
    leases: list[Lease] = []
    tokens = tokens_of(commit.txn, commit.t, local_owner.number, commit.told(local_owner))
    if not tokens:
        return leases
    point("store.fetching")
    room = want.count if want is not None and _alike(want, local_owner.asked) else 0
    for token in tokens:
        lease = _open(commit, local_owner.number, token) if len(leases) < room else None
        if lease is not None:
            leases.append(lease)
        else:
            back = Verdict(token, Outcome.RELEASE, error=NOT_STARTED)
            settle(commit, local_owner.number, local_owner.owner.name, back)
    return leases


_PATIENCE = 0.05  # seconds that a sleeper waits for the commit of a put that leases to it


def fetch_committed(store: Store, local_owner: LocalOwner, step: Step) -> Reply | None:
    """The leases that a plain put has just made for the owner; None if a full step must follow."""
    # This needs no write lock: it reads what is committed.
    want = step.want
    more = step.verdicts or step.notes or step.touch or step.history or step.held is not None
    if not local_owner.sleeper.has_lease(0.0 if more else _PATIENCE):
        return None
    if more or want is None or not _alike(want, local_owner.asked):
        return None
    with SignalsDeferred():
        if not store.commits.lead.acquire(blocking=False):  # another thread may make a step
            return None
        try:
            with store.reading_txn() as txn:
                leases = _leases_of_puts(store, txn, local_owner, want.count)
            if leases:
                local_owner.told = leases[-1].token
        finally:
            store.commits.pass_on()
    return Reply(leases=leases, next_due=0.0) if leases else None


def _leases_of_puts(
    store: Store, txn: lmdb.Transaction[bytes], local_owner: LocalOwner, most: int
) -> list[Lease]:
    """The owner's new leases of jobs that nobody has changed since; none if there are others."""
    number, tables, leases = local_owner.number, store.tables, list[Lease]()
    tokens = tokens_of(txn, tables, number, local_owner.told)
    if len(tokens) > most or departure_in(store, txn) is not None:
        return []
    point("store.fetching")
    for token in tokens:
        value = txn.get(LEASE_KEY.pack(number, token), db=tables.lease)
        assert value is not None
        data = txn.get(value[LEASE_VALUE.size :], db=tables.job)
        assert data is not None
        stored, (_, rank, seq, leased, _) = Stored(b"", data), LEASE_VALUE.unpack_from(value)
        head = stored.head
        if head.flags or head.expires:  # cancelled, or not the job of a plain put
            return []
        counts = head.attempt + 1, head.losses, rank, seq
        leases.append(Lease(token, *counts, head.timeout, leased / MICRO, 0.0, stored.envelope))
    return leases


def _alike(want: Want, asked: Want | None) -> bool:
    """True when ``want`` takes the jobs that a writer leased by the want ``asked``."""
    return asked is not None and (want.queues, want.mode, want.tasks, want.messages) == (
        asked.queues,
        asked.mode,
        asked.tasks,
        asked.messages,
    )


def _open(commit: Transitions, owner: int, token: int) -> Lease | None:
    """The lease behind a token; None when its job was cancelled or has expired meanwhile."""
    value = commit.txn.get(LEASE_KEY.pack(owner, token), db=commit.t.lease)
    assert value is not None
    stored = commit.load(value[LEASE_VALUE.size :])
    assert stored is not None
    head = stored.head
    if head.flags & Flag.CANCELLING or 0 < head.expires <= commit.now:
        return None
    return open_lease(commit, owner, token)
