"""The owners of this process: coming, going, sleeping, and noticing who died.

When is an owner dead? It has three signs of life: a FIFO that its kernel hangs up (on its own
machine), a session lock that its server frees, and a lease in the table that it renews.

    FIFO here, nobody holds it         dead, at once: its process is gone
    FIFO here, held                    alive, whatever the server says
    no FIFO here, lock held            alive: its session lasts, however slow it is
    no FIFO here, lock free, lease on  alive: its connection was cut, and it has time to come back
    no FIFO here, lock free, lease off dead; its neighbours on its own machine come first

The server frees every lock when it ends, and the leases run out while it is away: so nobody is
given up by the lease until the server, and our own hearing of it, have lasted as long as a lease.
"""

from __future__ import annotations

import logging
import os
import select
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidemill.board import read_board, remove_board
from tidemill.brokers.conversation import Conversation
from tidemill.brokers.liveness import Liveness, neighbours
from tidemill.brokers.postgres.exchange import send
from tidemill.brokers.postgres.handed import Handed
from tidemill.brokers.postgres.wire import clean, ints, texts
from tidemill.crash import point
from tidemill.errors import TidemillError
from tidemill.job import Owner

if TYPE_CHECKING:
    from tidemill.brokers.postgres.session import Session

__all__ = ["Member", "Members"]

_LOG = logging.getLogger("tidemill.postgres")
_PRECEDENCE = 5.0
"""Seconds that neighbours on a dead owner's own machine have to find it, who can read its board."""

_owner = msgspec.msgpack.Encoder()
_OWNER = msgspec.msgpack.Decoder(Owner)


class Row(msgspec.Struct, frozen=True):
    """An owner on the list. ``late`` is how long ago its lease ran out, negative before."""

    number: int
    id: str
    kind: str
    host: str
    locked: bool
    late: float
    facts: bytes

    @property
    def owner(self) -> Owner:
        """All that is known of it."""
        return _OWNER.decode(self.facts)


class Member:
    """An owner of this process: its number, its conversation, and where it sleeps."""

    def __init__(self, session: Session, owner: Owner, number: int) -> None:
        self.owner = owner
        self.number = number
        self.conversation = Conversation(lambda step, serial: send(session, self, step, serial))
        self.handed = Handed()
        self.renewed = time.monotonic()
        self.partial = False  # the last step took something, and less than was wanted
        self.outgrown = False  # the store is of another version by now
        self.watched: list[int] = []
        self.watched_fds: list[int] = []
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        os.set_blocking(self.write, False)

    def sleep(self, timeout: float, fds: Sequence[int]) -> tuple[list[int], bool]:
        """Until a hint, a wake, a death, a readable descriptor or the timeout.

        The descriptors that are readable, and whether one of those it watches has died.
        """
        poll = select.poll()
        poll.register(self.read, select.POLLIN)
        for fd in fds:
            poll.register(fd, select.POLLIN)
        for fd in self.watched_fds:
            poll.register(fd, 0)  # it hangs up
        ready = {fd for fd, _ in poll.poll(max(0.0, timeout) * 1000)}
        if self.read in ready:
            try:
                os.read(self.read, 4096)
            except BlockingIOError:
                pass
        return [fd for fd in fds if fd in ready], not ready.isdisjoint(self.watched_fds)

    def wake(self) -> None:
        """End its sleep, from any thread."""
        try:
            os.write(self.write, b"x")
        except (BlockingIOError, BrokenPipeError):
            pass  # it is full of hints already
        except OSError:
            pass  # it left a moment ago

    def close(self) -> None:
        """Give up where it sleeps."""
        os.close(self.read)
        os.close(self.write)


class Members:
    """The members this process has in one store."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._members: dict[int, Member] = {}
        self._by_id: dict[str, Member] = {}
        self._folder = os.path.join(
            tempfile.gettempdir(), f"tidemill-{os.getuid()}", session.installed.store
        )
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._liveness = Liveness(os.path.join(self._folder, "owners"))
        self._watching = threading.Lock()
        self._roster_changed = True

    def __getitem__(self, owner_id: str) -> Member:
        """A member that is attached.

        Raises:
            TidemillError: it is not, or not here.
        """
        member = self._by_id.get(owner_id)
        if member is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return member

    def ids(self) -> list[str]:
        """The ids of all that are attached here."""
        return list(self._by_id)

    @property
    def boards(self) -> str:
        """Where boards may lie: on this machine, as the FIFOs do."""
        folder = os.path.join(self._folder, "boards")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder

    # -- coming and going -----------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """Make an owner known, and alive as long as this process is."""
        self.detach(owner.id)
        session = self._session
        channel = session.listen()
        number = session.call(
            "attach",
            [
                *(owner.id, clean(owner.name), owner.kind, clean(owner.host), channel),
                *(session.hearing is not None, _owner.encode(owner)),
            ],
            "text, text, text, text, text, bool, bytea",
        )
        member = Member(session, owner, number)
        self._liveness.hold(number)
        if session.hearing is not None:
            session.hearing.hold(number)
        with self._watching:
            self._members[number] = self._by_id[owner.id] = member
        self.reap()
        self._watch(member)

    def detach(self, owner_id: str) -> None:
        """Take an owner off the list; what it held goes back uncounted."""
        member = self._by_id.get(owner_id)
        if member is None:
            return
        self.release(owner_id, {})
        with self._watching:
            self._by_id.pop(owner_id, None)
            self._members.pop(member.number, None)
            self._unwatch()
        if self._session.hearing is not None:
            self._session.hearing.let_go(member.number)
        self._liveness.let_go(member.number)
        member.close()

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Take an owner of any process off the list; how many leases it had."""
        ran = causes or {}
        held: int = self._session.once(
            "let_go",
            [
                *(owner_id, causes is not None, ints(list(ran))),
                texts([clean(cause) for cause in ran.values()]),
            ],
            "text, bool, bigint[], text[]",
        )
        return held

    # -- sleeping -------------------------------------------------------------------------------

    def wait(self, member: Member, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep as a member, and give back what owners held that died meanwhile."""
        session = self._session
        member.handed.waits()
        if member.partial:
            member.partial, timeout = False, 0.0
        lease = session.address.owner_lease / 3 - (time.monotonic() - member.renewed)
        ready, died = member.sleep(min(timeout, lease, session.longest_sleep()), fds)
        if died:
            self.reap()
        if died or self._roster_changed:
            self._watch(member)
        return ready

    def heard(self, word: str) -> None:
        """Something was said to owners of this process: to one, or to all."""
        if word[0].isdecimal():  # number, or number:turn:lease
            number, _, lease = word.partition(":")
            member = self._members.get(int(number))
            if member is not None:
                if lease:
                    turn, _, packed = lease.partition(":")
                    member.handed.arrived(int(turn), packed)
                member.wake()
            return
        if word == "roster":
            self._roster_changed = True
        self.wake_all()

    def wake_all(self) -> None:
        """End every sleep."""
        for member in list(self._members.values()):
            member.wake()

    def wake(self, owner_id: str) -> None:
        """End an owner's sleep, from any thread."""
        member = self._by_id.get(owner_id)
        if member:
            member.wake()

    def renewed(self, member: Member) -> None:
        """An exchange renewed its lease: see that it has its lock, too."""
        member.renewed = time.monotonic()
        if self._session.hearing is not None:
            self._session.hearing.renew(member.number)

    # -- deaths ---------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """The list of owners."""
        rows = self._session.rows("roster", [])
        return [Row(*row) for row in rows]

    def _watch(self, member: Member) -> None:
        """Have the member's sleep end when a neighbour on this machine dies."""
        self._roster_changed = False
        rows = [row for row in self.rows() if row.host == member.owner.host]
        numbers = neighbours(member.number, [(row.number, row.kind == "worker") for row in rows])
        with self._watching:
            numbers = [n for n in numbers if self._liveness.is_here(n)]
            member.watched_fds, gone = self._liveness.watch(numbers)
            member.watched = numbers
            self._unwatch()
        if gone:  # it died before it could be watched
            self.reap()

    def _unwatch(self) -> None:
        wanted = {number for member in self._members.values() for number in member.watched}
        self._liveness.unwatch(wanted)

    def reap(self) -> int:
        """Give back what owners that died held; how many owners that were."""
        self._liveness.keep()
        rows = self.rows()
        dead = [row for row in rows if row.number not in self._members and self._is_dead(row, rows)]
        for row in dead:
            owner = row.owner
            causes = self._causes(row, owner)
            point("store.reaping")
            self.release(row.id, causes)
            self._liveness.remove(row.number)
            if owner.board and self._near(row):
                remove_board(owner.board, owner.id)
            _LOG.warning("gave back what %s %s held, which died", row.kind, owner.name or row.id)
        point("store.reaped")
        return len(dead)

    def _is_dead(self, row: Row, rows: Sequence[Row]) -> bool:
        if self._liveness.is_here(row.number):
            return not self._liveness.alive(row.number)
        if row.late <= 0 or not self._session.lasted():
            return False
        if row.locked and self._session.call("is_locked", [row.number], "int", plain=True):
            return False
        near = any(r.host == row.host and r.number != row.number and r.late <= 0 for r in rows)
        return self._near(row) or not near or row.late > _PRECEDENCE

    def _near(self, row: Row) -> bool:
        """Whether it is, or was, on this machine: only then are its files here."""
        return any(member.owner.host == row.host for member in self._members.values())

    def _causes(self, row: Row, owner: Owner) -> dict[int, str] | None:
        """What a dead owner ran: a worker's board says; a consumer runs all it has taken."""
        if row.kind == "consumer":
            tokens = self._session.call("tokens_of", [row.number], "int", plain=True)
            return dict.fromkeys(tokens, f"{owner.name} died")
        running = read_board(owner.board, owner.id) if owner.board and self._near(row) else None
        if running is None:
            return None
        return dict.fromkeys(running, f"worker {owner.name} died with its processes")

    def after_fork_child(self) -> None:
        """In a forked child: all are the parent's; close our copies at once.

        Else the parent would seem alive for as long as any child of it is.
        """
        self._liveness.after_fork_child()
        for member in self._members.values():
            member.close()
        self._members, self._by_id = {}, {}
