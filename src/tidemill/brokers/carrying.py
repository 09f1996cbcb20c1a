"""A broker made of two: a carrier holds what is ready, a store everything else.

What is put, waits, is scheduled, runs or has ended is the store's business alone, and so are keys,
results, flows, limits and schedules: each of its steps is atomic there. From there a relay
(:mod:`.relay`) brings what is ready to the carrier, which hands it to the workers. A worker that
gets a message takes the lease it speaks of from the store, and only then runs the job; the message
is acknowledged at once, for from then on the store knows who runs what. Raw messages are not
carried: whoever asks for them takes them from the store.

| killed | what is left | what happens |
|---|---|---|
| the relay, before the carrier had it | its leases | they go back, and are published again |
| the relay, before handing over | a message, and its leases | they go back; the message is stale |
| a worker, before taking | the message, with the carrier | another worker gets it |
| a worker, after taking | its lease, in the store | as with any worker of that store |
| the carrier, with all it had | leases that nobody brings | called back within a minute or two |

A message that comes once more after its lease was taken is stale, whoever gets it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

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
    Want,
    need,
)
from tidemill.brokers.forks import tell_of_forks
from tidemill.brokers.limiting import Limiting, limiting
from tidemill.brokers.naming import naming
from tidemill.brokers.relay import Brought, Carrier, InvalidMessage, Relay, hold_back, unwrap
from tidemill.brokers.schedules import Change, Changed, Schedule
from tidemill.brokers.unknown import UnknownTask, setting_aside
from tidemill.brokers.watching import Watched
from tidemill.clock import machine_time, wall_time
from tidemill.crash import point
from tidemill.errors import BrokerUnavailable, TidemillError
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
    State,
    Verdict,
)

__all__ = ["CarryingBroker", "Store", "lending"]

_KEPT = 10.0
"""Seconds after which the message of a job that still runs is acknowledged: a server takes those
back that are not, after a time. Who has run anything for so long has not been brought more."""


class Store(Broker, Protocol):
    """A broker that lends its jobs to a carrier."""

    @property
    def identity(self) -> str:
        """What tells this store from every other."""
        ...


def lending(broker: Broker) -> Store:
    """The broker, as a store that lends its jobs to a carrier.

    Raises:
        FeatureMissing: it is none.
    """
    need(broker, Feature.CARRY, "store=")
    return cast(Store, broker)


class _Worker:
    """An owner: what the carrier brought it, until the store lets it have it."""

    def __init__(self, store: Broker, carrier: Carrier, owner: Owner) -> None:
        self._store = store
        self._carrier = carrier
        self._id = owner.id
        self._brought: list[Brought] = []
        self._kept: dict[int, tuple[int, float]] = {}
        """By token of a lease: that of its message, and when it was taken; in that order."""
        self._look = 0  # of the relay, at what there is since we last did something
        self._did = True  # something, and it was not asked to look since
        with contextlib.ExitStack() as undoing:
            carrier.attach(owner)
            undoing.callback(carrier.detach, owner.id)
            store.attach(owner)
            undoing.callback(store.detach, owner.id)
            self.relay = Relay(store, carrier, owner)
            undoing.pop_all()

    def exchange(self, step: Step) -> Reply:
        """One step of the store's, which takes what the carrier brought."""
        more = self._fetch(step, self._done_with(step))
        if self._brought:
            point("carried.brought")
        take = [(one.lease.token, one.id) for one in self._brought]
        want = self._not_carried(step)
        reply = self._store.exchange(msgspec.structs.replace(step, want=want, take=take))
        brought, self._brought = self._brought, []
        lost = len(reply.taken) < len(brought)  # nothing was looked at
        taken = [False] * len(brought) if lost else reply.taken
        now, since = wall_time(), machine_time()
        for one, mine in zip(brought, taken, strict=True):
            if mine:
                self.relay.came(one)
                one.lease.leased = now
                reply.leases.append(one.lease)
                self._kept[one.lease.token] = one.token, since
        if not all(taken):
            reply.next_due, more = 0.0, True  # something was stale, and is still wanted
        if brought:
            point("carried.taken")
        outcome = Outcome.RELEASE if lost else Outcome.SUCCESS
        not_taken = (one for one, mine in zip(brought, taken, strict=True) if not mine)
        self._end([Verdict(one.token, outcome) for one in not_taken])
        if step.verdicts or reply.leases:
            self._did = True
        elif self._did and step.want is not None:  # else it is woken with every job
            self._did, self._look = False, self.relay.ask()
        reply.more = more or self._did or not self.relay.has_looked(self._look)
        if self.relay.quiet and step.want is not None and step.want.count:
            reply.commands.append(Command("quiet"))  # the store has heard of nobody else's want
        return reply

    def _done_with(self, step: Step) -> list[Verdict]:
        """The ends of messages whose jobs have ended, or run for long."""
        kept, late = self._kept, machine_time() - _KEPT
        tokens = [one.token for one in step.verdicts if one.token in kept and not one.hold]
        tokens += itertools.takewhile(lambda token: kept[token][1] < late, kept)
        return [Verdict(kept.pop(token)[0], Outcome.SUCCESS) for token in dict.fromkeys(tokens)]

    def _fetch(self, step: Step, ends: list[Verdict]) -> bool:
        """Have in hand what is wanted; whether more may be on its way."""
        want = step.want
        if want is None or not want.tasks:
            self._end(ends)
            return False
        alone = want.alone and not any(one.lease.losses for one in self._brought)
        missing = max(0, want.count - len(self._brought))
        want = msgspec.structs.replace(want, count=missing, alone=alone, messages=False)
        said = self._carrier.exchange(Step(self._id, ends, want))
        for found in said.leases:
            try:
                self._brought.append(unwrap(found))
            except InvalidMessage as error:
                self._end([Verdict(found.token, Outcome.FAIL, error=str(error))])
        return said.more

    def _not_carried(self, step: Step) -> Want | None:
        """Requests to the store itself: messages, and jobs that are set aside."""
        want = step.want
        if want is None or not (want.messages or want.told >= 0 or want.knows):
            return None
        missing = max(0, want.count - len(self._brought))
        return msgspec.structs.replace(want, count=missing, tasks=False, alone=False)

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
            leaving.callback(self.leave)

    def leave(self) -> None:
        """Leave the carrier: nothing is brought over nor here any more."""
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._carrier.detach, self._id)
            leaving.callback(self._let_go)
            leaving.callback(self.relay.stop)

    def _let_go(self) -> None:
        ends = [Verdict(one.token, Outcome.RELEASE) for one in self._brought]
        ends += [Verdict(token, Outcome.SUCCESS) for token, _ in self._kept.values()]
        self._end(ends)


class CarryingBroker:
    """A store, and a carrier between it and the workers."""

    def __init__(self, store: Store, carrier: Carrier) -> None:
        self.store = store
        self.carrier = carrier
        self.url = carrier.url
        self.features = store.features - {Feature.CARRY, Feature.MERGED, Feature.ELSEWHERE}
        if isinstance(store, Watched):
            self.waits = store.waits
        self._workers: dict[str, _Worker] = {}
        tell_of_forks(self)

    def after_fork_child(self) -> None:
        """In a forked child: the owners are the parent's."""
        self._workers.clear()

    # -- what both have a part in ---------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        if owner.lease:
            need(self, Feature.ELSEWHERE, "a lease")
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
        reply = self.store.exchange(step) if worker is None else worker.exchange(step)
        if any(one.outcome in (Outcome.RETRY, Outcome.FAIL) for one in step.verdicts):
            if worker is not None:
                worker.relay.look_at_breakers()
            else:
                with contextlib.suppress(TidemillError):  # what was done counts in any case
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

    # -- what is the store's --------------------------------------------------------------------

    @property
    def identity(self) -> str:
        """That of the store."""
        return self.store.identity

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
        nonce: str = "",
    ) -> list[Put]:
        return self.store.put(jobs, txn=txn, hold=hold, let_go=let_go, nonce=nonce)

    def wake(self, owner_id: str) -> None:
        self.store.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        released = self.store.release(owner_id, causes)
        worker = self._workers.pop(owner_id, None)
        if worker is not None:
            worker.leave()
        return released

    def recall(self) -> int:
        return self.store.recall()

    def tick(self) -> float:
        return self.store.tick()

    def count_silence(self) -> float:
        return float("inf")  # there are no owners elsewhere

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

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        return self.store.kick(job_ids, force=force)

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self.store.delete(job_ids)

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self.store.set_queue(queue, paused=paused, max_size=max_size)

    def purge(self, queue: str) -> int:
        return self.store.purge(queue)

    def forget_queue(self, queue: str) -> bool:
        return self.store.forget_queue(queue)

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
        """As the store does it; what lies with the carrier is stale when nothing changes there."""
        departure = self.store.depart(where, seal=seal)
        if seal:
            with contextlib.suppress(BrokerUnavailable):  # it only takes up room
                for row in self.carrier.stats():
                    self.carrier.purge(row.name)
        return departure

    def stay(self) -> None:
        """As the store does it; what lay with the carrier may be gone, and goes there once more."""
        self.store.stay()
        self.store.recall()

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

    # -- jobs by name, where the store has them -------------------------------------------------

    def numbers(self, count: int) -> int:
        return naming(self.store, "numbers").numbers(count)

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        return naming(self.store, "head").head(queue, state, count)

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        return naming(self.store, "lease_named").lease_named(owner_id, job_ids)

    def unknown_tasks(self) -> list[UnknownTask]:
        return setting_aside(self.store, "unknown_tasks").unknown_tasks()

    # -- limits, where the store has them -------------------------------------------------------

    def set_limit(
        self, name: str, terms: Terms | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        """As the store has it; what is carried comes back to its line, and is held to that, too."""
        before = self._terms_of(name, queue)
        self._limiting.set_limit(name, terms, queue=queue, declared=declared)
        if self._terms_of(name, queue) != before:
            self.store.recall()

    def _terms_of(self, name: str, queue: bool) -> list[Terms]:
        rows = self._limiting.limits()
        return [row.terms for row in rows if (row.name, row.queue) == (name, queue)]

    def limits(self) -> list[LimitStats]:
        return self._limiting.limits()

    def held(self, job_id: str) -> Held | None:
        return self._limiting.held(job_id)

    @property
    def _limiting(self) -> Limiting:
        return limiting(self.store, "a limit")
