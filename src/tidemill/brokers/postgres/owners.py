"""The owners of this process on PostgreSQL, and the list of owners: ``sql/60_owners.sql``.

While the server is away, no owner can renew its lease. So leases count only after the server has
answered this process for the time of a lease.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.postgres import inspect
from tidemill.brokers.postgres.encoding import clean, ints, texts
from tidemill.brokers.postgres.exchange import send
from tidemill.brokers.postgres.handoff import HandOff
from tidemill.brokers.shared import owners as shared
from tidemill.brokers.shared.liveness import Liveness
from tidemill.brokers.shared.lost_jobs import MOST_LOOKED_AT
from tidemill.brokers.shared.owners import Causes, Ended, Proof, Row, folder_here
from tidemill.brokers.shared.remote_owners import SignOfLife
from tidemill.brokers.shared.waits import Until
from tidemill.core.job import Owner, Record

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session

_owner = msgspec.msgpack.Encoder()
_OWNER = msgspec.msgpack.Decoder(Owner)


class AttachedOwner(shared.ConnectedOwner):
    def __init__(self, session: Session, owner: Owner, number: int) -> None:
        super().__init__(owner, number)
        self._session = session
        self.hand_off = HandOff()
        self.partial = False  # True when the last step took some jobs, but fewer than wanted
        self.hears = False  # this process gets the notifications of a remote owner
        self._turn = 0

    def send(self, step: Step, serial: int) -> Reply:
        return send(self._session, self, step, serial)

    def goes_on(self, owner: Owner) -> None:
        super().goes_on(owner)
        self._turn = 0

    def turned(self, turn: int) -> None:
        """Store the turn of an answered step. Turns count the owner's steps in all processes."""
        if self._turn and turn != self._turn + 1:  # another process has made a step
            self.hears = False
        self._turn = turn

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], Ended]:
        session = self._session
        self.hand_off.has_waited = True
        if self.partial:
            self.partial, timeout = False, 0.0
        lease = self.owner.lease or session.address.owner_lease
        left = lease / 3 - (time.monotonic() - self.renewed)
        return (yield from super().parked(min(timeout, left, session.longest_sleep()), fds))


class Owners(shared.Owners[AttachedOwner]):
    def __init__(self, session: Session) -> None:
        self._session = session
        folder = folder_here(session.installed.store)
        super().__init__(Liveness(os.path.join(folder, "owners")))
        self._by_number: dict[int, AttachedOwner] = {}

    @property
    def boards(self) -> str:
        """The folder in which scoreboards may lie: on this machine, like the FIFOs."""
        return folder_here(self._session.installed.store, "boards")

    def listed(self) -> list[Owner]:
        return [row.owner for row in self._rows()]

    def _rows(self) -> list[Row]:
        rows = self._session.rows("roster", [])
        return [Row(_OWNER.decode(facts), number, late) for number, late, facts in rows]

    def _draw(self, owner: Owner) -> int:
        schema = self._session.address.schema
        text = f"SELECT nextval(pg_get_serial_sequence('\"{schema}\".owner', 'number'))"
        number: int = self._session.query(text)[0][0]
        return number

    def _make(self, owner: Owner, number: int) -> AttachedOwner:
        attached = self._by_number[number] = AttachedOwner(self._session, owner, number)
        return attached

    def _drop(self, attached: AttachedOwner) -> None:
        self._by_number.pop(attached.number, None)
        super()._drop(attached)

    def attach(self, owner: Owner) -> None:
        super().attach(owner)
        if (attached := self._by_id.get(owner.id)) is not None:
            attached.hears = True

    def _list(self, attached: AttachedOwner, before: AttachedOwner | None) -> None:
        self._attach(attached.owner, attached.number)

    def _attach(self, owner: Owner, number: int | None) -> int:
        listed: int = self._session.call(
            "attach",
            [
                *(owner.id, clean(owner.name), owner.kind, clean(owner.host)),
                *(self._session.listen(), _owner.encode(owner), owner.lease, owner.serial, number),
            ],
            "text, text, text, text, text, bytea, float8, bigint, int",
        )
        return listed

    def _trusts(self) -> bool:
        return self._session.lasted()

    def _let_go(self, owner_id: str, causes: Causes, proof: Proof, *, brisk: bool) -> int | None:
        ran = causes or {}
        held: int | None = self._session.once(
            "let_go",
            [
                *(owner_id, causes is not None, ints(list(ran))),
                texts([clean(cause) for cause in ran.values()]),
                proof.number if isinstance(proof, Row) else None,
                proof.word if isinstance(proof, SignOfLife) else None,
                isinstance(proof, Row) and proof.late > 0,
            ],
            "text, bool, bigint[], text[], int, bigint, bool",
            brisk=brisk,
        )
        return held

    def _held_by(self, owner_id: str, *, brisk: bool) -> list[str]:
        schema = self._session.address.schema
        rows = self._session.query(
            f'SELECT j.id FROM "{schema}".owner AS o '
            f'JOIN "{schema}".lease AS l ON l.owner = o.number '
            f'JOIN "{schema}".job AS j ON j.seq = l.seq WHERE o.id = %s LIMIT %s',
            [owner_id, MOST_LOOKED_AT],
            brisk=brisk,
        )
        return [job_id for (job_id,) in rows]

    def _get(self, ids: Sequence[str], *, brisk: bool) -> Iterable[Record | None]:
        return inspect.get(self._session, ids, brisk=brisk)

    def _join(self, owner: Owner) -> int:
        return self._attach(owner, None)

    def _remote(self, owner_id: str) -> tuple[Owner, int] | None:
        schema = self._session.address.schema
        text = f'SELECT facts, number FROM "{schema}".owner WHERE id = %s AND lease > 0'
        rows = self._session.query(text, [owner_id])
        return (_OWNER.decode(rows[0][0]), rows[0][1]) if rows else None

    def _words(self) -> dict[tuple[str, int], SignOfLife]:
        rows = self._session.rows("words", [])
        return {
            (owner_id, number): SignOfLife(lease, object() if holds else turn)
            for number, owner_id, lease, turn, holds in rows
        }

    def renewed(self, attached: AttachedOwner, step: Step) -> None:
        """Go on after an exchange has renewed the owner's lease."""
        # After a step with a want, this process gets the notifications of a remote owner. After
        # another step, the remote owner may sleep in another process.
        attached.renewed = time.monotonic()
        if attached.owner.lease and step.want is not None and not attached.hears:
            here = [attached.number, self._session.listen()]
            self._session.call("hear", here, "int, text", plain=True)
            # Ask again: notifications before this were lost.
            attached.hears = attached.partial = True

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

    def after_fork_child(self) -> None:
        super().after_fork_child()
        self._by_number = {}
