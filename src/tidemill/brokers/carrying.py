"""A broker made of two: a carrier holds what is ready, a store everything else.

What is put, waits, is scheduled, runs or has ended is the store's business alone, and so are keys,
results, flows, limits and schedules: each of its steps is atomic there. From there a relay
(:mod:`.relay`) brings what is ready to the carrier, which hands it to the workers. A worker that
gets a message takes the lease it speaks of from the store, and only then runs the job; the message
is acknowledged at once, for from then on the store knows who runs what. Raw messages are not
carried: consumers take them from the store.

| killed | what is left | what happens |
|---|---|---|
| the relay, before the carrier had it | its leases | they go back, and are published again |
| the relay, before handing over | a message, and its leases | they go back; the message is stale |
| a worker, before taking | the message, with the carrier | another worker gets it |
| a worker, after taking | its lease, in the store | as with any worker of that store |
| the carrier, with all it had | leases that nobody brings | called back within a minute of rest |
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from tidemill.brokers.base import (
    Broker,
    Departure,
    Feature,
    Filter,
    Page,
    QueueStats,
    Reply,
    Step,
)
from tidemill.brokers.limiting import Limiting, limiting
from tidemill.brokers.relay import InvalidMessage, Relay, unwrap
from tidemill.brokers.schedules import Change, Changed, Schedule
from tidemill.clock import wall_time
from tidemill.crash import point
from tidemill.errors import BrokerUnavailable, FeatureMissing
from tidemill.gate import Held, LimitStats, Terms
from tidemill.job import (
    RELAY,
    Command,
    Envelope,
    Lease,
    Outcome,
    Owner,
    Put,
    Record,
    Verdict,
)

__all__ = ["Carrier", "CarryingBroker"]


class Carrier(Broker, Protocol):
    """A broker whose owners can be waited for beside something else."""

    def bell(self, owner_id: str) -> int:
        """A descriptor that is readable when something came, once ``arm`` was called."""
        ...

    def arm(self, owner_id: str) -> bool:
        """Have the bell rung from now on; False when something has come already."""
        ...

    def disarm(self, owner_id: str) -> None:
        """Have it rung no more."""
        ...

    def doubt(self, owner_id: str, jobs: Sequence[Envelope]) -> None:
        """These were put: that there was nothing is no longer known."""
        ...


class _Worker:
    """An owner: what the carrier brought it, until the store lets it have it."""

    def __init__(self, store: Broker, carrier: Carrier, owner: Owner) -> None:
        self._store = store
        self._carrier = carrier
        self._id = owner.id
        self._brought: list[tuple[int, str, Lease]] = []  # (the carrier's token, id, lease)
        self._alone: list[tuple[int, str, Lease]] = []  # such as are to run alone
        self._look = 0  # of the relay, at what there is since we last did something
        with contextlib.ExitStack() as undoing:
            carrier.attach(owner)
            undoing.callback(carrier.detach, owner.id)
            store.attach(owner)
            undoing.callback(store.detach, owner.id)
            self.relay = Relay(store, carrier, owner, lambda jobs: carrier.doubt(owner.id, jobs))
            undoing.pop_all()

    def exchange(self, step: Step) -> Reply:
        """One step of the store's, which takes what the carrier brought."""
        more = self._fetch(step)
        if self._brought:
            point("carried.brought")
        take = [(lease.token, job_id) for _, job_id, lease in self._brought]
        reply = self._store.exchange(msgspec.structs.replace(step, want=None, take=take))
        brought, self._brought = self._brought, []
        lost = len(reply.taken) < len(brought)  # nothing was looked at
        taken = [False] * len(brought) if lost else reply.taken
        now = wall_time()
        for (_, _, lease), mine in zip(brought, taken, strict=True):
            if mine:
                lease.leased = now
                reply.leases.append(lease)
        if len(reply.leases) < len(brought):
            reply.next_due = 0.0  # something was stale, and is still wanted
        if brought:
            point("carried.taken")
        outcome = Outcome.RELEASE if lost else Outcome.SUCCESS
        self._end([Verdict(token, outcome) for token, _, _ in brought])
        if step.verdicts or reply.leases or not self._look:
            self._look = self.relay.ask()
        reply.more = more or not self.relay.has_looked(self._look)
        return reply

    def _fetch(self, step: Step) -> bool:
        """Have in hand what is wanted; whether more may be on its way."""
        want = step.want
        if want is None:
            return False
        if want.alone and self._alone and not any(lease.losses for *_, lease in self._brought):
            self._brought.insert(0, self._alone.pop(0))
        missing = want.count - len(self._brought)
        said = self._carrier.exchange(
            Step(self._id, want=msgspec.structs.replace(want, count=max(0, missing)))
        )
        for found in said.leases:
            try:
                one = (found.token, *unwrap(found))
            except InvalidMessage as error:
                self._end([Verdict(found.token, Outcome.FAIL, error=str(error))])
            else:
                (self._alone if one[2].losses else self._brought).append(one)
        if self._alone and want.alone and not any(lease.losses for *_, lease in self._brought):
            self._brought.insert(0, self._alone.pop(0))
        return said.more

    def _end(self, verdicts: list[Verdict]) -> None:
        if verdicts:
            self._carrier.exchange(Step(self._id, verdicts))

    def wait(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep until the carrier brings something, or the store has something to say."""
        bell = self._carrier.bell(self._id)
        if not self._carrier.arm(self._id):
            timeout = 0.0
        try:
            ready = self._store.wait(self._id, timeout, [bell, *fds])
        finally:
            self._carrier.disarm(self._id)
        return [fd for fd in ready if fd != bell]

    def detach(self) -> None:
        """Leave both; what was brought and not taken is for others."""
        with contextlib.ExitStack() as leaving:  # each of them, whatever becomes of the others
            leaving.callback(self._store.detach, self._id)
            leaving.callback(self._carrier.detach, self._id)
            leaving.callback(self._give_back)
            leaving.callback(self.relay.stop)

    def _give_back(self) -> None:
        self._end([Verdict(token, Outcome.RELEASE) for token, *_ in self._brought + self._alone])


class CarryingBroker:
    """A store, and a carrier between it and the workers."""

    def __init__(self, store: Broker, carrier: Carrier) -> None:
        if Feature.CARRY not in store.features:
            scheme = store.url.split("://", 1)[0]
            raise FeatureMissing(f"store= needs the feature carry, which {scheme}:// does not have")
        self.store = store
        self.carrier = carrier
        self.url = carrier.url
        self.features = store.features - {Feature.CARRY, Feature.MERGED}
        self._workers: dict[str, _Worker] = {}
        _brokers.add(self)

    def after_fork_child(self) -> None:
        """In a forked child: the owners are the parent's."""
        self._workers.clear()

    # -- what both have a part in ---------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        worker = self._workers.get(owner.id)
        if worker is not None or owner.kind == "consumer":
            self.store.attach(owner)
        else:
            self._workers[owner.id] = _Worker(self.store, self.carrier, owner)

    def detach(self, owner_id: str) -> None:
        worker = self._workers.pop(owner_id, None)
        if worker is not None:
            worker.detach()
        else:
            self.store.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        worker = self._workers.get(step.owner)
        return self.store.exchange(step) if worker is None else worker.exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        worker = self._workers.get(owner_id)
        if worker is None:
            return self.store.wait(owner_id, timeout, fds)
        return worker.wait(timeout, fds)

    def owners(self) -> list[Owner]:
        return [owner for owner in self.store.owners() if owner.kind != RELAY]

    def info(self) -> dict[str, Any]:
        carrier = {f"carrier {name}": fact for name, fact in self.carrier.info().items()}
        return self.store.info() | carrier

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self.store.close)
            closing.callback(self.carrier.close)
            for owner_id in list(self._workers):
                with contextlib.suppress(BrokerUnavailable):
                    self.detach(owner_id)

    # -- what is the store's --------------------------------------------------------------------

    @property
    def boards(self) -> str:
        return self.store.boards

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
    ) -> list[Put]:
        return self.store.put(jobs, txn=txn, hold=hold, let_go=let_go)

    def wake(self, owner_id: str) -> None:
        self.store.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        return self.store.release(owner_id, causes)

    def recall(self) -> int:
        return self.store.recall()

    def tick(self) -> float:
        return self.store.tick()

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        return self.store.wait_for(ids, timeout, first=first)

    def wait_space(self, queue: str, timeout: float) -> bool:
        return self.store.wait_space(queue, timeout)

    def get(self, job_id: str) -> Record | None:
        return self.store.get(job_id)

    def was_here(self, job_id: str) -> bool:
        return self.store.was_here(job_id)

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        return self.store.find(what, limit, cursor)

    def stats(self) -> list[QueueStats]:
        return self.store.stats()

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        return self.store.cancel(job_ids, terminate=terminate)

    def kick(self, job_ids: Iterable[str]) -> list[bool]:
        return self.store.kick(job_ids)

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self.store.delete(job_ids)

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self.store.set_queue(queue, paused=paused, max_size=max_size)

    def purge(self, queue: str) -> int:
        return self.store.purge(queue)

    def command(self, owner_id: str, command: Command) -> bool:
        return self.store.command(owner_id, command)

    def backup(self, target: str) -> None:
        self.store.backup(target)

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        return self.store.schedules(names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        return self.store.list_schedules(after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        return self.store.change_schedules(changes)

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        return self.store.depart(where, seal=seal)

    def stay(self) -> None:
        self.store.stay()

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        return self.store.adopt(departure, records, cursor, schedules)

    def adopted(self, mark: str) -> str:
        return self.store.adopted(mark)

    # -- limits, where the store has them -------------------------------------------------------

    def set_limit(
        self, name: str, terms: Terms | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        self._limiting.set_limit(name, terms, queue=queue, declared=declared)

    def limits(self) -> list[LimitStats]:
        return self._limiting.limits()

    def held(self, job_id: str) -> Held | None:
        return self._limiting.held(job_id)

    @property
    def _limiting(self) -> Limiting:
        return limiting(self.store, "a limit")


_brokers: weakref.WeakSet[CarryingBroker] = weakref.WeakSet()


def _after_fork_child() -> None:
    for broker in list(_brokers):
        broker.after_fork_child()


os.register_at_fork(after_in_child=_after_fork_child)
