"""Short forms by which the conformance tests drive a broker: jobs, owners and a recount."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope, rank_of
from tidemill.core.job import Lease, Note, Outcome, Owner, Record, State, Verdict
from tidemill.core.retry import ENDLESS, RetryPolicy

UNFINISHED = (State.WAITING, State.SCHEDULED, State.READY, State.RUNNING)


def job(
    queue: str = "default", *, priority: float = 0, retries: int = 3, **fields: Any
) -> Envelope:
    """A task's job."""
    fields.setdefault("id", new_id())
    fields.setdefault("task", "app.work")
    policy = RetryPolicy(limit=retries, jitter=False)
    return Envelope(queue=queue, rank=rank_of(priority), retries=policy, **fields)


def message(queue: str = "default", **fields: Any) -> Envelope:
    """A raw message."""
    fields.setdefault("id", new_id())
    fields.setdefault("retries", ENDLESS)
    return Envelope(queue=queue, **fields)


class LiveOwner:
    """An owner that is attached to a broker."""

    def __init__(
        self, broker: Broker, name: str = "w1", kind: str = "worker", **facts: Any
    ) -> None:
        self.broker = broker
        self.id = f"{name}-{new_id()}"
        self.kind = kind
        broker.attach(Owner(id=self.id, kind=kind, name=name, **facts))

    def exchange(self, **step: Any) -> Reply:
        return self.broker.exchange(Step(self.id, **step))

    def take(
        self,
        count: int = 1,
        queues: Sequence[str] = (),
        mode: Mode = Mode.STRICT,
        *,
        kinds: str | None = None,
    ) -> list[Lease]:
        """Lease jobs: a worker takes tasks, a consumer messages, unless ``kinds`` says both."""
        consumer = self.kind == "consumer"
        want = Want(
            count,
            tuple(queues),
            mode,
            tasks=kinds == "both" or not consumer,
            messages=kinds == "both" or consumer,
        )
        return self.take_all(want)

    def take_all(self, want: Want, limit: float = 60.0) -> list[Lease]:
        """Lease for a want, including jobs still on their way from a broker that pushes."""
        reply = self.exchange(want=want)
        leases, until = list(reply.leases), time.monotonic() + limit
        while reply.more and len(leases) < want.count:
            assert time.monotonic() < until, f"still on its way after {limit:g} s"
            self.broker.wait(self.id, min(1.0, reply.next_due))
            alone = want.alone and not any(lease.losses for lease in leases)
            left = msgspec.structs.replace(want, count=want.count - len(leases), alone=alone)
            reply = self.exchange(want=left)
            leases += reply.leases
        return leases

    def await_all(self, count: int, limit: float = 60.0, **want: Any) -> list[Lease]:
        """Lease until there are ``count`` jobs, sleeping in between."""
        leases, until = list[Lease](), time.monotonic() + limit
        consumer = self.kind == "consumer"
        while len(leases) < count:
            assert time.monotonic() < until, f"{len(leases)} of {count} after {limit:g} s"
            asked = Want(count - len(leases), tasks=not consumer, messages=consumer, **want)
            reply = self.exchange(want=asked)
            leases += reply.leases
            if not reply.leases:
                self.broker.wait(self.id, min(1.0, reply.next_due))
        return leases

    def take_ids(self, count: int = 100, *args: Any, **kwargs: Any) -> list[str]:
        return [lease.open().id for lease in self.take(count, *args, **kwargs)]

    def settle(self, lease: Lease | int, outcome: Outcome = Outcome.SUCCESS, **fields: Any) -> bool:
        token = lease if isinstance(lease, int) else lease.token
        return self.exchange(verdicts=[Verdict(token, outcome, **fields)]).settled[0]

    def touch(self, lease: Lease, seconds: float = 0.0) -> bool:
        return self.exchange(touch=[(lease.token, seconds)]).touched[0]

    def note(self, lease: Lease, **fields: Any) -> None:
        self.exchange(notes=[Note(lease.token, **fields)])

    def commands(self) -> list[tuple[str, int]]:
        return [(command.verb, command.token) for command in self.exchange().commands]


def state(broker: Broker, job_id: str) -> State:
    return shown(broker, job_id).state


def shown(broker: Broker, job_id: str) -> Record:
    record = broker.get(job_id)
    assert record is not None, f"{job_id} is gone"
    return record


def everything(broker: Broker, what: Filter | None = None, limit: int = 7) -> list[Record]:
    """All records, page by page."""
    records: list[Record] = []
    cursor = ""
    while True:
        page = broker.find(what or Filter(), limit, cursor)
        assert len(page.records) <= limit
        records += page.records
        if not page.cursor:
            return records
        cursor = page.cursor


def whole(broker: Broker, listed: Iterable[Record]) -> list[Record]:
    """The jobs of a list with results, logs and bodies."""
    ids = [record.envelope.id for record in listed]
    return [record for record in broker.wait_for(ids, 0) if record is not None]


def check_counts(broker: Broker) -> None:
    """Check that counters equal a recount and no record is listed twice, if it can list."""
    if Feature.INSPECT not in broker.features:
        return
    records = everything(broker, limit=500)
    assert len({r.envelope.id for r in records}) == len(records)
    counted = Counter((r.envelope.queue, r.state) for r in records)
    for row in broker.stats():
        shown = {s: getattr(row, s.value) for s in UNFINISHED}
        assert shown == {s: counted[row.name, s] for s in UNFINISHED}, row.name
        assert row.size == sum(shown.values())


def ids_of(envelopes: Iterable[Envelope]) -> list[str]:
    return [envelope.id for envelope in envelopes]
