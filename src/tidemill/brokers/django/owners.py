"""The owners of this process in a database of a Django project, and the list of owners.

While the database is away, no owner can renew its lease. So leases count only after the database
has answered for as long as a lease lasts. No notification tells that the list has changed: owners
choose their neighbours again with each look for dead owners.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.parked_waits import Until
from tidemill.brokers.django.connections import Connection, Database
from tidemill.brokers.django.transaction import Transaction
from tidemill.brokers.django.wakeup import OWNERS, Bell, ring
from tidemill.brokers.rules.settle import release_owner
from tidemill.brokers.shared import owners as shared
from tidemill.brokers.shared.liveness import Liveness
from tidemill.brokers.shared.owners import Ended, Row, folder_here
from tidemill.brokers.shared.remote_owners import SignOfLife
from tidemill.core.owner import Owner

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Owner).decode


class Change(Protocol):
    """Changes the store in one transaction."""

    def __call__(self, work: Callable[[Transaction], T], /) -> T: ...


def number_of(owner_id: str) -> int:
    """The number in the name of an owner's FIFO."""
    return int.from_bytes(hashlib.sha256(owner_id.encode()).digest()[:7])


class AttachedOwner(shared.ConnectedOwner):
    """An owner attached in this process."""

    def __init__(
        self,
        send: Callable[[AttachedOwner, Step, int], Reply],
        owner: Owner,
        number: int,
        wakes: str,
    ) -> None:
        super().__init__(owner, number)
        self._send = functools.partial(send, self)
        self._bell = Bell(wakes, OWNERS)

    def send(self, step: Step, serial: int) -> Reply:
        return self._send(step, serial)

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], Ended]:
        ready, died = yield from super().parked(timeout, [*self._bell.fds, *fds])
        self._bell.drain()
        return [fd for fd in ready if fd in fds], died

    def close(self) -> None:
        super().close()
        self._bell.close()

    def after_fork_child(self) -> None:
        super().after_fork_child()
        self._bell.after_fork_child()


class Owners(shared.Owners[AttachedOwner]):
    """The owners that this process has in one store. ``send`` makes a step."""

    def __init__(
        self,
        store: str,
        database: Database,
        change: Change,
        send: Callable[[AttachedOwner, Step, int], Reply],
        lease: float,
    ) -> None:
        self._store = store
        self._database = database
        self._change = change
        self._send = send
        self._lease = lease
        folder = folder_here(store)
        self.wakes = os.path.join(folder, "wake")
        super().__init__(Liveness(os.path.join(folder, "owners")))

    @property
    def boards(self) -> str:
        """The folder in which scoreboards may lie."""
        return folder_here(self._store, "boards")

    def listed(self) -> list[Owner]:
        """All owners."""
        return [row.owner for row in self._rows()]

    def _rows(self) -> list[Row]:
        def work(connection: Connection) -> list[Row]:
            found = connection.execute('SELECT facts, "until" FROM tidemill_owner ORDER BY id')
            now = self._database.now_of(connection.execute)
            owners = [(_decode(bytes(facts)), until) for facts, until in found]
            return [Row(owner, number_of(owner.id), now - until) for owner, until in owners]

        return self._database.read(work)

    def _draw(self, owner: Owner) -> int:
        return number_of(owner.id)

    def _make(self, owner: Owner, number: int) -> AttachedOwner:
        return AttachedOwner(self._send, owner, number, self.wakes)

    def _list(self, attached: AttachedOwner, before: AttachedOwner | None) -> None:
        owner = attached.owner

        def enlist(transaction: Transaction) -> None:
            transaction.jobs.check_here()
            transaction.jobs.need_holder(owner.id)
            release_owner(transaction.jobs, owner.id, {})
            transaction.rows.upsert(
                "tidemill_owner",
                ["id"],
                ("id", "until", "serial", "facts", "commands", "reply"),
                [(owner.id, transaction.jobs.now + self._lease, 0, _encode(owner), b"", b"")],
            )

        self._change(enlist)

    def _trusts(self) -> bool:
        return time.monotonic() - self._database.since >= self._lease

    def _let_go(
        self,
        owner_id: str,
        causes: Mapping[int, str] | None,
        proof: Row | SignOfLife | None,
        *,
        brisk: bool,
    ) -> int:
        is_late = isinstance(proof, Row) and proof.late > 0

        def work(transaction: Transaction) -> int:
            rows, jobs = transaction.rows, transaction.jobs
            text = 'SELECT id FROM tidemill_owner WHERE id = %s AND "until" > %s'
            if is_late and rows.execute(text, [owner_id, jobs.now]):
                return 0
            jobs.need_holder(owner_id)
            held = release_owner(jobs, owner_id, causes)
            rows.send("DELETE FROM tidemill_owner WHERE id = %s", [owner_id])
            return held

        held = self._change(work)
        if held:
            ring(self.wakes, OWNERS)
        return held

    def reap(self) -> int:
        """Give back the leases of dead owners; return the number of dead owners."""
        self._changes += 1
        return super().reap()
