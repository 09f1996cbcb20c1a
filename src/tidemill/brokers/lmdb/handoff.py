"""Direct hand-off: a put leases its jobs to a sleeping worker, in its own commit.

Without the hand-off, a job starts after two commits: the commit of the put and the commit of the
lease. A sleeper leaves its want in the store when it goes to sleep. By this want the writer of a
put leases jobs for the sleeper. The sleeper gets a hint, and waits for the write lock. Then it
finds leases with tokens higher than all tokens that it knows: these are its new leases. So the
sleeper writes nothing.

Until the sleeper looks, it holds these leases like prefetched jobs. When the sleeper looks, jobs
that it can no longer use go back. If the sleeper dies before it looks, all these jobs go back and
count no attempt, since its scoreboard shows none of them. Messages are never handed over: their ttr
(time to run) would begin before anybody knows of the lease.
"""

from __future__ import annotations

from tidemill.brokers.contract.exchange import Mode, Want
from tidemill.brokers.lmdb.claim import Leasing
from tidemill.brokers.lmdb.layout import LEASE_KEY, LEASE_VALUE, tokens_of
from tidemill.brokers.lmdb.owner_table import is_listed
from tidemill.brokers.lmdb.owners import LocalOwner
from tidemill.brokers.lmdb.record import Flag
from tidemill.brokers.lmdb.reply_cache import open_lease
from tidemill.brokers.lmdb.settle import settle
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.lmdb.wakeup import NOTHING, SleeperWant
from tidemill.brokers.lmdb.workflows import flow
from tidemill.core.crash_points import point
from tidemill.core.job import NOT_STARTED, Lease, Outcome, Verdict

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
    """Lease jobs to a sleeper, by the want that the sleeper left; return their number.

    ``lines`` are the lines that got a job: only these may have a job for a sleeper.
    """
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
