"""The owners of this process in a database of a Django project, and the list of owners.

While the database is away, no owner can renew its lease. So leases count only after the database
has answered for as long as a lease lasts. No notification tells that the list has changed: owners
choose their neighbours again with each look for dead owners.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.django.exchange import exchange, first_reads, has_nothing, renew
from tidemill.brokers.django.jobs import StoredJobs
from tidemill.brokers.django.store import Store
from tidemill.brokers.django.tables import Rows
from tidemill.brokers.django.wakeup import OWNERS, Bell
from tidemill.brokers.rules.settle import release_owner
from tidemill.brokers.rules.transitions import store_moved
from tidemill.brokers.shared import owners as shared
from tidemill.brokers.shared.liveness import Liveness
from tidemill.brokers.shared.owners import Causes, Ended, Proof, Row
from tidemill.brokers.shared.waits import Until
from tidemill.core.job import Owner
from tidemill.core.signals import restart_on_signal

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Owner).decode


# A consumer is not late while the ttr of a message lasts: ``alarm`` is the end of this time.
_LISTED = (
    'SELECT facts, "until", (SELECT max(alarm) FROM tidemill_job WHERE state = 3 AND state <= 3 '
    "AND holder = tidemill_owner.id) FROM tidemill_owner"
)


def number_of(owner_id: str) -> int:
    """The number in the name of an owner's FIFO."""
    return int.from_bytes(hashlib.sha256(owner_id.encode()).digest()[:7])


def _row(found: Sequence[Any], now: float) -> Row:
    facts, until, busy = found
    owner = _decode(bytes(facts))
    return Row(owner, number_of(owner.id), now - max(until, busy or 0.0))


class AttachedOwner(shared.ConnectedOwner):
    def __init__(self, store: Store, owner: Owner, number: int) -> None:
        super().__init__(owner, number)
        self._store = store
        self._bell = Bell(store.wakes, OWNERS)

    def exchange(self, step: Step) -> Reply:
        if self.owner.kind != "consumer":
            return super().exchange(step)
        # A signal ends the wait; the step is then repeated.
        reply = restart_on_signal(super().exchange)(step)
        quiet = any(command.verb == "quiet" for command in reply.commands)
        asks = step.want is not None and step.want.count
        if quiet and asks and (departure := self._store.facts().departure) is not None:
            raise store_moved(departure)
        return reply

    def send(self, step: Step, serial: int) -> Reply:
        store, alive = self._store, self._store.address.owner_lease
        patience = step.patience or min(2.0, store.address.patience)
        found = store.read(lambda rows: has_nothing(rows, step, alive), patience=patience)
        if found is not None:
            return found

        def work(jobs: StoredJobs) -> Reply:
            jobs.last_queue = store.last_queue
            reply = exchange(jobs, self.owner, step, serial, alive)
            store.last_queue = jobs.last_queue
            return reply

        reply = store.change_on_time(
            work,
            patience=patience,
            also=first_reads(step),
            with_each=lambda jobs: renew(jobs, step.owner, alive),
        )
        self.renewed = time.monotonic()
        return reply

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
    def __init__(self, store: Store) -> None:
        self._store = store
        super().__init__(Liveness(os.path.join(store.folder(), "owners")))

    def listed(self) -> list[Owner]:
        return [row.owner for row in self._rows()]

    def _rows(self) -> list[Row]:
        def work(rows: Rows) -> list[Row]:
            found = rows.execute(_LISTED + " ORDER BY id")
            now = rows.now()
            return [_row(one, now) for one in found]

        return self._store.read(work)

    def _draw(self, owner: Owner) -> int:
        return number_of(owner.id)

    def _join(self, owner: Owner) -> int:
        raise lacks(self._store.address.text, Feature.REMOTE_OWNERS, "an owner on another machine")

    def _make(self, owner: Owner, number: int) -> AttachedOwner:
        return AttachedOwner(self._store, owner, number)

    def _list(self, attached: AttachedOwner, before: AttachedOwner | None) -> None:
        owner, lease = attached.owner, self._store.address.owner_lease

        def enlist(jobs: StoredJobs) -> None:
            jobs.check_here()
            jobs.need_holder(owner.id)
            release_owner(jobs, owner.id, {})
            jobs.rows.upsert(
                "tidemill_owner",
                ["id"],
                ("id", "until", "serial", "facts", "commands", "reply"),
                [(owner.id, jobs.now + lease, 0, _encode(owner), b"", b"")],
            )

        self._store.change(enlist)

    def _trusts(self) -> bool:
        answering = time.monotonic() - self._store.database.since
        return answering >= self._store.address.owner_lease

    def _let_go(self, owner_id: str, causes: Causes, proof: Proof, *, brisk: bool) -> int | None:
        def work(jobs: StoredJobs) -> int | None:
            found = jobs.rows.execute(_LISTED + " WHERE id = %s", [owner_id])
            if not found:
                return None
            if isinstance(proof, Row) and self._lives(_row(found[0], jobs.now), proof):
                return None
            jobs.need_holder(owner_id)
            held = release_owner(jobs, owner_id, causes)
            jobs.rows.send("DELETE FROM tidemill_owner WHERE id = %s", [owner_id])
            return held

        return self._store.change(work, rings=OWNERS)

    def _lives(self, row: Row, proof: Row) -> bool:
        """Whether an owner has shown since the proof of its death that it lives."""
        # An owner that attaches again has the same number, since its id gives the number.
        return row.late <= 0 if proof.late > 0 else self._liveness.alive(row.number)

    def reap(self) -> int:
        self._changes += 1
        return super().reap()
