"""The owners of this process: attaching, detaching, sleeping, and detecting deaths.

An owner has two signs of life: a FIFO on its own machine, and a lease in the table. Each step of
the owner renews the lease. When the owner dies, the kernel closes its FIFO.

    FIFO here, nobody holds it    dead, at once: its process is gone
    FIFO here, held               alive, whatever the server says
    no FIFO here, lease on        alive
    no FIFO here, lease off       dead; owners on its own machine reap it first

While the server is away, no owner can renew its lease. So leases count only after the server has
answered this process for the time of a lease.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.parked_waits import Parked
from tidemill.brokers.postgres import inspect
from tidemill.brokers.postgres.encoding import clean, ints, texts
from tidemill.brokers.postgres.exchange import send
from tidemill.brokers.postgres.owner import AttachedOwner
from tidemill.brokers.shared.liveness import Liveness, neighbours
from tidemill.brokers.shared.lost_jobs import MOST_LOOKED_AT, log_failed
from tidemill.brokers.shared.remote_owners import SignOfLife, Silence
from tidemill.core.crash_points import point
from tidemill.core.errors import TidemillError
from tidemill.core.files import private_folder
from tidemill.core.locks import Lock, LongLock
from tidemill.core.owner import Owner
from tidemill.core.scoreboard import read_scoreboard, remove_scoreboard

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

_LOG = logging.getLogger("tidemill.postgres")
_PRECEDENCE = 5.0
"""Seconds in which only owners on the dead owner's machine reap it: they read its scoreboard."""

_owner = msgspec.msgpack.Encoder()
_OWNER = msgspec.msgpack.Decoder(Owner)


class Row(msgspec.Struct, frozen=True):
    """An owner on the list. ``late``: seconds since the end of its lease; negative before."""

    number: int
    id: str
    kind: str
    host: str
    late: float
    facts: bytes
    lease: float

    @property
    def owner(self) -> Owner:
        """The owner's own facts, decoded."""
        return _OWNER.decode(self.facts)


class Owners:
    """The owners that this process has in one store."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._send = functools.partial(send, session)
        self._by_number: dict[int, AttachedOwner] = {}
        self._by_id: dict[str, AttachedOwner] = {}
        self._folder = os.path.join(private_folder(), session.installed.store)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        self._liveness = Liveness(os.path.join(self._folder, "owners"))
        self._watching, self._joining = Lock(), LongLock()
        self._silence: Silence[str] = Silence()
        self._changes = 0  # of the list, as far as this process was told

    def __getitem__(self, owner_id: str) -> AttachedOwner:
        """Return an attached owner. A remote owner may have attached in another process.

        Raises:
            TidemillError: the owner is not attached, or is attached in another process.
        """
        attached = self.find(owner_id)
        if attached is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return attached

    def find(self, owner_id: str) -> AttachedOwner | None:
        """Return an attached owner, or None."""
        return self._by_id.get(owner_id) or self._go_on(owner_id)

    @property
    def boards(self) -> str:
        """The folder in which scoreboards may lie: on this machine, like the FIFOs."""
        folder = os.path.join(self._folder, "boards")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder

    # -- coming and going -----------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """List an owner. A local owner lives as long as this process.

        A remote owner lives as long as its steps come in time.
        """
        here = self._by_id.get(owner.id)
        if not (owner.lease and here and here.owner.lease):
            self.detach(owner.id)
        session = self._session
        channel = session.listen()
        number = session.call(
            "attach",
            [
                *(owner.id, clean(owner.name), owner.kind, clean(owner.host), channel),
                *(_owner.encode(owner), owner.lease, owner.serial),
            ],
            "text, text, text, text, text, bytea, float8, bigint",
        )
        if not owner.lease:
            self._liveness.hold(number)
        attached = self._enter(owner, number)
        attached.hears = True
        if not owner.lease:  # the others may have looked before the FIFO was there
            session.tell_all("roster")
        self.reap()
        self._watch(attached)

    def _enter(self, owner: Owner, number: int) -> AttachedOwner:
        with self._watching:
            attached = self._by_id.get(owner.id)
            if attached is not None and attached.number == number:
                attached.goes_on(owner)
                return attached
            if attached is not None:
                self._drop(attached)
            attached = AttachedOwner(self._send, owner, number)
            self._by_number[number] = self._by_id[owner.id] = attached
            return attached

    def _drop(self, attached: AttachedOwner) -> None:
        """Forget an owner of this process."""
        del self._by_number[attached.number], self._by_id[attached.owner.id]
        attached.close()

    # -- remote owners --------------------------------------------------------------------------

    def _go_on(self, owner_id: str) -> AttachedOwner | None:
        """Take over the calls of the remote owner with this id, if the list has that owner."""
        with self._joining:
            if owner_id in self._by_id:  # another thread was faster
                return self._by_id[owner_id]
            rows = self._session.rows("elsewhere", [owner_id], "text")
            if not rows:
                return None
            [(number, facts)] = rows
            attached = self._enter(_OWNER.decode(facts), number)
            attached.wake()  # end its first wait at once, since it may have missed a hint
        self._watch(attached)
        return attached

    def anew(self, attached: AttachedOwner) -> AttachedOwner | None:
        """Return the remote owner, read again if it attached through another server."""
        with self._joining:
            rows = self._session.rows("elsewhere", [attached.owner.id], "text")
            if not rows or rows[0][0] == attached.number:
                return None
            [(number, facts)] = rows
            anew = self._enter(_OWNER.decode(facts), number)
            anew.wake()
            return anew

    def count_silence(self) -> float:
        """Give up remote owners that were silent for their lease."""
        away = [m for m in list(self._by_number.values()) if m.owner.lease and not m.near]
        words: dict[str, SignOfLife] = {}
        listed: set[int] = set()
        for number, owner_id, lease, turn, holds in self._session.rows("words", []):
            listed.add(number)
            words[owner_id] = SignOfLife(lease, object() if holds else turn)
        silent, again = self._silence.look(words)
        for owner_id in silent:
            ids = self._held_by(owner_id)
            self._session.once("give_up", [owner_id, words[owner_id].word], "text, bigint")
            if ids:
                log_failed(inspect.get(self._session, ids))
        self._forget([attached for attached in away if attached.number not in listed])
        return again

    def _forget(self, gone: Collection[AttachedOwner]) -> None:
        """Forget remote owners that are no longer listed.

        These owners may never call again. A sleeping owner is only woken, and forgotten later. An
        owner that is ``near`` is kept: its next step learns that the owner is lost.
        """
        for attached in gone:
            if not attached.asleep.end_if_empty():
                attached.wake()
                continue
            with self._watching:
                if self._by_number.get(attached.number) is attached:
                    self._drop(attached)
                    self._unwatch()

    # -- going ----------------------------------------------------------------------------------

    def detach(self, owner_id: str) -> None:
        """Take an owner off the list; its jobs go back uncounted."""
        attached = self._by_id.get(owner_id)
        if attached is None:
            if any(row.id == owner_id and row.lease for row in self.rows()):
                self.release(owner_id, {})
            return
        self.release(owner_id, {})
        with self._watching:
            self._drop(attached)
            self._unwatch()
        self._liveness.let_go(attached.number)

    def leave(self) -> None:
        """Take local owners off the list when the broker closes; remote owners stay listed."""
        for owner_id, attached in list(self._by_id.items()):
            if attached.owner.lease:
                attached.close()
            else:
                self.detach(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Take an owner of any process off the list; return the number of its leases."""
        ran = causes or {}
        ids = self._held_by(owner_id) if causes is None else []
        held: int = self._session.once(
            "let_go",
            [
                *(owner_id, causes is not None, ints(list(ran))),
                texts([clean(cause) for cause in ran.values()]),
            ],
            "text, bool, bigint[], text[]",
        )
        if ids:
            log_failed(inspect.get(self._session, ids))
        return held

    def _held_by(self, owner_id: str) -> list[str]:
        """The ids of an owner's jobs. These jobs may fail when the owner is given up."""
        schema = self._session.address.schema
        rows = self._session.query(
            f'SELECT j.id FROM "{schema}".owner AS o '
            f'JOIN "{schema}".lease AS l ON l.owner = o.number '
            f'JOIN "{schema}".job AS j ON j.seq = l.seq WHERE o.id = %s LIMIT %s',
            [owner_id, MOST_LOOKED_AT],
        )
        return [job_id for (job_id,) in rows]

    # -- sleeping -------------------------------------------------------------------------------

    def parked(self, attached: AttachedOwner, timeout: float, fds: Sequence[int]) -> Parked:
        """Sleep as an owner; give back the leases of owners that die meanwhile."""
        session = self._session
        attached.hand_off.waits()
        if attached.partial:
            attached.partial, timeout = False, 0.0
        lease = attached.owner.lease or session.address.owner_lease
        lease = lease / 3 - (time.monotonic() - attached.renewed)
        with attached.asleep.inside() as may:
            if not may:
                return []  # the owner was given up or attached again a moment ago
            timeout = min(timeout, lease, session.longest_sleep())
            ready, died = yield from attached.parked(timeout, fds)
        if died:
            self.reap()
        if died or attached.seen != self._changes:
            self._watch(attached)
        return ready

    def heard(self, word: str) -> None:
        """Pass on a notification to one owner of this process, or to all."""
        # The word is the number of an owner, or number:turn:lease.
        if word[0].isdecimal():
            number, _, lease = word.partition(":")
            attached = self._by_number.get(int(number))
            if attached is not None:
                if lease:
                    turn, _, packed = lease.partition(":")
                    attached.hand_off.arrived(int(turn), packed)
                attached.wake()
            return
        if word == "roster":
            self._changes += 1
        self.wake_all()

    def back(self) -> None:
        """Look at everything again, since notifications were lost."""
        self._changes += 1
        self.wake_all()

    def wake_all(self) -> None:
        """End every sleep."""
        for attached in list(self._by_number.values()):
            attached.wake()

    def wake(self, owner_id: str) -> None:
        """End an owner's sleep, from any thread."""
        attached = self._by_id.get(owner_id)
        if attached:
            attached.wake()

    def renewed(self, attached: AttachedOwner, step: Step) -> None:
        """Go on after an exchange has renewed the owner's lease.

        After a step with a want, this process gets the notifications of a remote owner. After
        another step, the remote owner may sleep in another process.
        """
        attached.renewed = time.monotonic()
        if attached.owner.lease and step.want is not None and not attached.hears:
            self._session.call("hear", [attached.number, self._session.listen()], "int, text")
            # Ask again: notifications before this were lost.
            attached.hears = attached.partial = True

    # -- deaths ---------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """Return the list of owners."""
        rows = self._session.rows("roster", [])
        return [Row(*row) for row in rows]

    def _watch(self, attached: AttachedOwner) -> None:
        """End the owner's sleep when one of its neighbours on this machine dies."""
        attached.seen = self._changes
        rows = [r for r in self.rows() if r.host == attached.owner.host and not r.lease]
        numbers = neighbours(attached.number, [(row.number, row.kind == "worker") for row in rows])
        with self._watching:
            numbers = [n for n in numbers if self._liveness.is_here(n)]
            attached.watched_fds, gone = self._liveness.watch(numbers)
            attached.watched = numbers
            self._unwatch()
        if gone:  # a neighbour died before it could be watched
            self.reap()

    def _unwatch(self) -> None:
        owners = list(self._by_number.values())
        wanted = {number for attached in owners for number in attached.watched}
        self._liveness.unwatch(wanted)

    def reap(self) -> int:
        """Give back the leases of dead owners; return the number of dead owners."""
        self._liveness.keep()
        rows = self.rows()
        others = [row for row in rows if row.number not in self._by_number]
        dead = [row for row in others if self._is_dead(row, rows)]
        for row in dead:
            owner = row.owner
            causes = self._causes(row, owner)
            point("store.reaping")
            self.release(row.id, causes)
            self._liveness.remove(row.number)
            if owner.board and self._near(row):
                remove_scoreboard(owner.board, owner.id)
            _LOG.warning("%s %s died; its jobs go back", row.kind, owner.name or row.id)
        point("store.reaped")
        return len(dead)

    def _is_dead(self, row: Row, rows: Sequence[Row]) -> bool:
        if row.lease:
            return False
        if self._liveness.is_here(row.number):
            return not self._liveness.alive(row.number)
        if row.late <= 0 or not self._session.lasted():
            return False
        near = any(r.host == row.host and r.number != row.number and r.late <= 0 for r in rows)
        return self._near(row) or not near or row.late > _PRECEDENCE

    def _near(self, row: Row) -> bool:
        """Whether the owner is or was on this machine, which then has its files."""
        return any(attached.owner.host == row.host for attached in list(self._by_number.values()))

    def _causes(self, row: Row, owner: Owner) -> dict[int, str] | None:
        """Return the jobs that a dead owner ran: by its scoreboard, or all jobs of a consumer."""
        if row.kind == "consumer":
            tokens = self._session.call("tokens_of", [row.number], "int", plain=True)
            return dict.fromkeys(tokens, f"{owner.name} died")
        is_readable = owner.board and self._near(row)
        running = read_scoreboard(owner.board, owner.id) if is_readable else None
        if running is None:
            return None
        return dict.fromkeys(running, f"worker {owner.name} died with its processes")

    def after_fork_child(self) -> None:
        """Leave the owners to the parent, in a forked child, and close the copies at once.

        If the child kept the copies, a dead parent would seem alive.
        """
        self._liveness.after_fork_child()
        for attached in list(self._by_number.values()):
            attached.after_fork_child()
        self._by_number, self._by_id = {}, {}
