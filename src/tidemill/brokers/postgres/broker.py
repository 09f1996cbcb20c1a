"""``postgresql://``: the broker in a PostgreSQL database.

This file has the core of the contract; :mod:`.calls` has all other calls. Each call becomes one
statement (see ``sql/``). :mod:`.owners` holds the owners of this process, and :mod:`.waits` its
waiters.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tidemill.brokers.contract.exchange import Reply, Step, is_lost, lost
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.parked_waits import Parked, sleep
from tidemill.brokers.postgres.calls import (
    AdminCalls,
    HistoryCalls,
    InspectionCalls,
    JobNumberCalls,
    LimitCalls,
    ScheduleCalls,
    TransferCalls,
)
from tidemill.brokers.postgres.grants import statements
from tidemill.brokers.postgres.migrate import bring_up
from tidemill.brokers.postgres.put import put, put_inside
from tidemill.brokers.postgres.settings import check_url
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope
from tidemill.core.job import Put, Record
from tidemill.core.owner import Owner

_PRUNE_MOST = 2000
_TICK = 30.0


def open_url(url: Url) -> PostgresBroker:
    """Open the broker of a ``postgresql://`` URL."""
    return PostgresBroker(check_url(url))


def migrate_url(url: Url) -> tuple[int, int]:
    """Migrate the tables of a ``postgresql://`` URL; return the versions before and after."""
    return bring_up(check_url(url))


def grants_url(url: Url, role: str) -> list[str]:
    """The SQL that lets a role use the store of a ``postgresql://`` URL."""
    return statements(check_url(url).schema, role)


class PostgresBroker(
    InspectionCalls,
    AdminCalls,
    LimitCalls,
    JobNumberCalls,
    ScheduleCalls,
    HistoryCalls,
    TransferCalls,
):
    """A broker in a PostgreSQL database."""

    features = frozenset(Feature) - {Feature.BACKUP}

    @property
    def identity(self) -> str:
        """The name of this store; no other store has this name."""
        return f"postgresql {self._session.installed.store}"

    @property
    def boards(self) -> str:
        """The folder for scoreboards."""
        return self._owners.boards

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        self._check_open()
        if txn is not None:
            return put_inside(self._session, jobs, txn, hold, let_go)
        return put(self._session, jobs, hold, let_go, nonce)

    def attach(self, owner: Owner) -> None:
        self._check_open()
        self._owners.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._owners.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.serial or step.behalf:
            attached = self._owners.find(step.owner)
        else:
            attached = self._owners[step.owner]
        if attached is None:
            return lost(step)
        reply = attached.exchange(step)
        if step.serial and is_lost(reply) and (anew := self._owners.anew(attached)):
            attached, reply = anew, anew.exchange(step)
        if not step.behalf:
            self._owners.renewed(attached, step)
        return reply

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        attached = self._owners[owner_id]
        until_tick = self._next_tick - time.monotonic()
        ready = yield from self._owners.parked(attached, min(timeout, until_tick), fds)
        if time.monotonic() >= self._next_tick:
            self.tick()
        return ready

    def wake(self, owner_id: str) -> None:
        self._owners.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        self._check_open()
        return self._owners.release(owner_id, causes)

    def reap(self) -> int:
        """Give back the leases of dead owners; return the number of dead owners."""
        self._check_open()
        return self._owners.reap()

    def tick(self) -> float:
        self._check_open()
        # Each waiting owner looks for dead owners as often as owners renew their leases.
        self._next_tick = time.monotonic() + min(_TICK, self._address.owner_lease / 3)
        self._session.look_for_upgrade()
        self.reap()
        text = f'CALL "{self._address.schema}".tick(%s, %s::"{self._address.schema}".prefs, NULL)'
        while self._session.query(text, [_PRUNE_MOST, self._session.prefs()])[0][0]:
            pass
        self._history.fold()
        return _TICK

    def count_silence(self) -> float:
        self._check_open()
        return self._owners.count_silence()

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        self._check_open()
        if first:
            self.waits.for_first(ids, timeout)
        else:
            self.waits.for_jobs(ids, timeout)
        return self.get_many(ids)

    def wait_space(self, queue: str, timeout: float) -> bool:
        self._check_open()
        return self.waits.for_space(queue, timeout)
