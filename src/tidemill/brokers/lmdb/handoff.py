"""Direct hand-off: a put leases what it stored to a worker that sleeps for it, in its own commit.

Else two commits would stand between a put and the start: the put's, and that of the lease. The
writer does for the sleeper what that would do if it were awake: the same leasing, under the terms
it left with its mark. The sleeper was hinted, and waits for the write lock; it then finds leases it
was not told of (their tokens are higher than any it knows), and has nothing to write.

Until it looks, it holds them as it would hold what it prefetched: what it can no longer use goes
back when it looks, and what it held when it died goes back uncounted, as nothing of it was on its
board. Messages are never handed over: their ttr would run while nobody knows of the lease.
"""

from __future__ import annotations

from tidemill.brokers.base import Mode, Want
from tidemill.brokers.lmdb.flows import flow
from tidemill.brokers.lmdb.layout import LEASE_KEY, LEASE_VALUE
from tidemill.brokers.lmdb.leases import Leasing
from tidemill.brokers.lmdb.members import Member
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.record import Flag
from tidemill.brokers.lmdb.roster import is_listed
from tidemill.brokers.lmdb.said import open_lease
from tidemill.brokers.lmdb.verdicts import settle
from tidemill.brokers.lmdb.wake import NOTHING, Terms
from tidemill.crash import point
from tidemill.job import NOT_STARTED, Lease, Outcome, Verdict

__all__ = ["fetch", "hand_over", "terms_of"]

_MODES = tuple(Mode)


def terms_of(moves: Moves, member: Member, want: Want, taken: int) -> Terms:
    """What a writer may lease to the member while it sleeps; nothing unless it takes just tasks."""
    member.asked = want
    if member.owner.kind != "worker" or want.messages or member.owner.lease:
        return NOTHING  # one elsewhere may be gone, and nobody knows: it would sit on them
    rows = [row for name in want.queues if (row := moves.existing_row(name))]
    numbers = tuple(row.number for row in rows) if want.queues else None
    return Terms(want.count - taken, _MODES.index(want.mode), numbers)


def hand_over(moves: Moves, lines: list[int], owner: int, terms: Terms) -> int:
    """Lease to a sleeper what it would take if it were awake; how many jobs those were.

    ``lines`` are those something was added to: in the others there is nothing for a sleeper.
    """
    room, mode, queues = terms
    if not room or queues == () or not is_listed(moves, owner):
        return 0
    leasing = Leasing(moves, owner, deadlines=False)
    if len(lines) > 1:
        names = tuple(moves.row_of(number * 2).name for number in queues or ())
        leasing.take(Want(room, names, _MODES[mode], alone=False), 0)
    else:
        row = moves.row_of(lines[0])
        if not row.paused and (queues is None or row.number in queues):
            leasing.take_line(row.lines[0], room)
    flow(moves)  # what had expired was ended on the way
    point("store.handed")
    return len(leasing.leases)


def fetch(moves: Moves, member: Member, want: Want | None) -> list[Lease]:
    """The leases made in the member's name while it slept; those it does not want go back."""
    leases: list[Lease] = []
    tokens = _untold(moves, member)
    if not tokens:
        return leases
    point("store.fetching")
    room = want.count if want is not None and _alike(want, member.asked) else 0
    for token in tokens:
        lease = _open(moves, member.number, token) if len(leases) < room else None
        if lease is not None:
            leases.append(lease)
        else:
            back = Verdict(token, Outcome.RELEASE, error=NOT_STARTED)
            settle(moves, member.number, member.owner.name, back)
    return leases


def _untold(moves: Moves, member: Member) -> list[int]:
    """Tokens of leases the member was not told of."""
    cursor = moves.txn.cursor(moves.t.lease)
    found = cursor.set_range(LEASE_KEY.pack(member.number, member.told + 1))
    tokens = []
    while found:
        owner, token = LEASE_KEY.unpack(cursor.key())
        if owner != member.number:
            break
        tokens.append(token)
        found = cursor.next()
    return tokens


def _alike(want: Want, asked: Want | None) -> bool:
    """Whether what was leased by the terms of the one is what the other would take."""
    return asked is not None and (want.queues, want.mode, want.tasks, want.messages) == (
        asked.queues,
        asked.mode,
        asked.tasks,
        asked.messages,
    )


def _open(moves: Moves, owner: int, token: int) -> Lease | None:
    """The lease behind a token; None when its job was cancelled or has expired meanwhile."""
    value = moves.txn.get(LEASE_KEY.pack(owner, token), db=moves.t.lease)
    assert value is not None
    stored = moves.load(value[LEASE_VALUE.size :])
    assert stored is not None
    head = stored.head
    if head.flags & Flag.CANCELLING or 0 < head.expires <= moves.now:
        return None
    return open_lease(moves, owner, token)
