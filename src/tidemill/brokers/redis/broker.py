"""``redis://``: the broker of a store on a Redis server.

This file has the core of the contract; :mod:`.calls` has all other calls. Each call runs one
function on the server: see ``lua/``. :mod:`.connections` connects to the server, :mod:`.owners`
holds the owners of this process.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tidemill.brokers.contract.exchange import Reply, Step, check_nonce, is_lost, lost
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.parked_waits import Parked, sleep
from tidemill.brokers.redis.calls import (
    AdminCalls,
    HistoryCalls,
    InspectionCalls,
    JobNumberCalls,
    LimitCalls,
    ScheduleCalls,
    TransferCalls,
    refuse_txn,
)
from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.errors import refusal
from tidemill.brokers.redis.open import open_store
from tidemill.brokers.redis.owners import check_moved
from tidemill.brokers.redis.record import MICRO, line_and_rank, pack_holds, pack_put
from tidemill.brokers.redis.settings import check_url
from tidemill.brokers.shared.owners import folder_here
from tidemill.core.clock import clock
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope
from tidemill.core.errors import BrokerUnavailable
from tidemill.core.job import Placed, Put, Record
from tidemill.core.owner import Owner

log = logging.getLogger("tidemill.redis")

_TICK = 30.0
_PLACED = tuple(Placed)


def open_url(url: Url) -> RedisBroker:
    """The broker of a URL."""
    return RedisBroker(check_url(url))


class RedisBroker(
    InspectionCalls,
    AdminCalls,
    LimitCalls,
    JobNumberCalls,
    ScheduleCalls,
    HistoryCalls,
    TransferCalls,
):
    """A broker on a Redis server."""

    features = frozenset(Feature) - {Feature.TRANSACTIONS, Feature.BACKUP}

    @property
    def identity(self) -> str:
        """The name of this store: its prefix, and its time of creation to the microsecond."""
        return f"redis {self._settings.prefix} {self._born!r}"

    @property
    def boards(self) -> str:
        """The folder of scoreboards on this machine, which other processes read after a death."""
        return folder_here("redis", "boards")

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        refuse_txn(txn)
        check_nonce(nonce)
        if not jobs and not let_go:
            return []
        self._check_open()
        packed = pack_put(jobs)
        held = pack_holds(jobs, hold, let_go)
        plain = line_and_rank(jobs[0]) if len(jobs) == 1 and not packed[3] else None
        return _puts(jobs, self._lines.put(packed, plain, held, nonce))

    def attach(self, owner: Owner) -> None:
        self._check_open()
        self._owners.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._owners.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.behalf:
            return self._owners.hear_behalf(step)
        attached = self._owners.find(step.owner) if step.serial else self._owners[step.owner]
        reply = attached.exchange(step) if attached else lost(step)
        self._doubtful |= is_lost(reply)
        self._history.unfolded += len(step.history)
        if self._doubtful:
            with contextlib.suppress(BrokerUnavailable):  # if this fails, the next step tries again
                self._look_for_loss()
        return reply

    def _look_for_loss(self) -> None:
        """Log an error if the server has another store now. Runs after an owner was unknown."""
        born, now = open_store(self._brisk)
        self._doubtful = False
        if born / MICRO != self._born:
            self._born, self._ahead = born / MICRO, now / MICRO - clock.wall()
            log.error(
                "redis at %s has lost its store: another store is in its place: %s",
                self._lines.server.where,
                self._inspection.info(self._settings.replicas)["durability"],
            )

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        attached = self._owners[owner_id]
        limit = max(0.0, self._next_tick - time.monotonic())
        ready = yield from self._owners.parked(attached, min(timeout, limit), fds)
        if time.monotonic() >= self._next_tick:
            self._tick(self._brisk)
        if self._history.has_many():
            self._history.fold()
        return ready

    def wake(self, owner_id: str) -> None:
        self._owners.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        self._check_open()
        return self._owners.release(owner_id, causes)

    def reap(self) -> int:
        """Give back the leases of owners that are given up; return the number of these owners."""
        self._check_open()
        return self._owners.reap()

    def tick(self) -> float:
        self._check_open()
        self._tick(self._lines)
        return _TICK

    def count_silence(self) -> float:
        self._check_open()
        return self._owners.count_silence()

    def _tick(self, lines: ServerConnections) -> None:
        # Each waiting owner looks for dead owners as often as owners renew their leases.
        self._next_tick = time.monotonic() + min(_TICK, self._settings.owner_lease / 3)
        self._owners.reap()
        self._go_on(lines)
        self._history.fold()

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        records = self.get_many(ids)
        going_on = [i for i, r in zip(ids, records, strict=True) if r and not r.state.finished]
        if timeout > 0 and going_on and not (first and len(going_on) < len(ids)):
            verb = b"first" if first else b"jobs"
            self.waits.until(verb, [job_id.encode() for job_id in going_on], timeout)
            records = self.get_many(ids)
        return records

    def wait_space(self, queue: str, timeout: float) -> bool:
        self._check_open()
        return self.waits.until(b"space", [queue.encode()], timeout)


def _puts(jobs: Sequence[Envelope], answer: Any) -> list[Put]:
    """The outcome of a put, from the server's answer."""
    check_moved(answer)
    if answer == 1:
        created = Placed.CREATED
        return [Put(job.id, created) for job in jobs]
    what = answer[0]
    if isinstance(what, bytes):
        raise refusal(what, *[part.decode() for part in answer[1:] if part is not None])
    pairs = zip(answer[0::2], answer[1::2], strict=True)
    return [Put(job_id.decode(), _PLACED[placed]) for placed, job_id in pairs]
