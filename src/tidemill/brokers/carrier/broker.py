"""A store with a carrier: the carrier holds the ready jobs, the store everything else.

Each step of a job is atomic in the store: puts, waits, due times, runs and ends, keys, results,
flows, limits and schedules. A relay (:mod:`.relay`) brings ready jobs to the carrier, which hands
them to workers. Each message names a lease. The worker that receives the message takes this lease
from the store, and only then runs the job. From then on, the store knows the owner of the job. So
the worker may acknowledge the message later. Raw messages are not carried; consumers take them from
the store.

| killed | left over | effect |
|---|---|---|
| the relay, before publishing | its leases | they go back, and are published again |
| the relay, before hand-over | messages, and its leases | leases go back; messages are stale |
| a worker, before taking | the message, with the carrier | another worker gets it |
| a worker, after taking | its lease, in the store | as with any worker of that store |
| the carrier, with all its messages | leases that no message brings | recalled within two minutes |

A message that comes again after its lease was taken is stale, whoever gets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.brokers.carrier.lending import LendingStore
from tidemill.brokers.carrier.relay import (
    Carrier,
    hold_back,
)
from tidemill.brokers.carrier.store_calls import StoreCalls
from tidemill.brokers.carrier.worker import CarriedWorker
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.brokers.shared.job_watch import Watched
from tidemill.core.errors import BrokerUnavailable, TidemillError
from tidemill.core.job import Outcome
from tidemill.core.limit_settings import LimitSettings
from tidemill.core.owner import RELAY, Owner


class CarryingBroker(StoreCalls):
    """A store, and a carrier between it and the workers."""

    def __init__(self, store: LendingStore, carrier: Carrier) -> None:
        self.store = store
        self.carrier = carrier
        self.url = carrier.url
        self.features = store.features - {Feature.CARRY, Feature.MERGED, Feature.REMOTE_OWNERS}
        if isinstance(store, Watched):
            self.waits = store.waits
        self._workers: dict[str, CarriedWorker] = {}
        tell_of_forks(self)

    def after_fork_child(self) -> None:
        """Forget the owners in a forked child: they belong to the parent."""
        self._workers.clear()

    # -- calls of both --------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        if owner.lease:
            need(self, Feature.REMOTE_OWNERS, "a lease")
        worker = self._workers.get(owner.id)
        if worker is not None or owner.kind == "consumer":
            self.store.attach(owner)
        else:
            self._workers[owner.id] = CarriedWorker(self.store, self.carrier, owner)

    def detach(self, owner_id: str) -> None:
        worker = self._workers.pop(owner_id, None)
        if worker is not None:
            worker.detach()
        else:
            self.store.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        worker = self._workers.get(step.owner)
        reply = self.store.exchange(step) if worker is None else worker.exchange(step)
        if any(one.outcome in (Outcome.RETRY, Outcome.FAIL) for one in step.verdicts):
            if worker is not None:
                worker.relay.look_at_breakers()
            else:
                # If the recall fails, the step is still done.
                with contextlib.suppress(TidemillError):
                    hold_back(self.store)
        return reply

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        worker = self._workers.get(owner_id)
        if worker is None:
            return self.store.wait(owner_id, timeout, fds)
        return worker.wait(timeout, fds)

    def owners(self) -> list[Owner]:
        return [owner for owner in self.store.owners() if owner.kind != RELAY]

    def info(self) -> dict[str, Any]:
        store, carrier = self.store.info(), self.carrier.info()
        both = {"broker": f"{carrier['broker']}+{store['broker']}", "url": self.url}
        facts = {f"carrier {name}": fact for name, fact in carrier.items() if name not in both}
        facts["carrier ready"] = sum(row.ready for row in self.carrier.stats())
        return store | both | {"store": store.get("url", self.store.url)} | facts

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self.store.close)
            closing.callback(self.carrier.close)
            for owner_id in list(self._workers):
                with contextlib.suppress(BrokerUnavailable):
                    self.detach(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        released = self.store.release(owner_id, causes)
        worker = self._workers.pop(owner_id, None)
        if worker is not None:
            worker.leave()
        return released

    def count_silence(self) -> float:
        return float("inf")  # a store with a carrier has no remote owners

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        """Begin the move of the store's jobs to another store; a seal makes all messages stale."""
        departure = self.store.depart(where, seal=seal)
        if seal:
            # If the purge fails, stale messages only take up room.
            with contextlib.suppress(BrokerUnavailable):
                for row in self.carrier.stats():
                    self.carrier.purge(row.name)
        return departure

    def stay(self) -> None:
        """Cancel the move of the jobs. The relay publishes again, since messages may be gone."""
        self.store.stay()
        self.store.recall()

    # -- limits, where the store has them -------------------------------------------------------

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        """Set a limit in the store; carried jobs come back, so that they obey the limit, too."""
        before = self._terms_of(name, queue)
        self._limit_calls.set_limit(name, terms, queue=queue, declared=declared)
        if self._terms_of(name, queue) != before:
            self.store.recall()

    def _terms_of(self, name: str, queue: bool) -> list[LimitSettings]:
        rows = self._limit_calls.limits()
        return [row.terms for row in rows if (row.name, row.queue) == (name, queue)]
