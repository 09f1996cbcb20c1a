"""For the tests of the hand-off on Redis and PostgreSQL: owners that sleep, and what is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from postgres_desk import connect

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.connections import ServerConnection
from tidemill.core.envelope import Envelope, rank_of
from tidemill.core.job import Lease, Outcome, Owner, State, Verdict


class Sleeper:
    """An owner that waits between its steps, as workers do."""

    def __init__(self, broker: Any, name: str = "w", kind: str = "worker") -> None:
        self.broker = broker
        self.name = name
        broker.attach(Owner(id=name, kind=kind, name=name))
        self.attached = broker._owners[name]

    def sleep(self, count: int = 4, queues: Sequence[str] = (), **want: Any) -> None:
        """Begin to sleep, for so many jobs."""
        self.broker.wait(self.name, 0.0)
        assert self.take(count, queues, **want) == []

    def hear(self) -> None:
        """Sleep until a lease comes."""
        give_up = time.monotonic() + 20
        while not self._has_heard():
            assert time.monotonic() < give_up
            self.broker.wait(self.name, 0.1)

    def _has_heard(self) -> bool:
        if isinstance(self.broker, RedisBroker):
            return bool(self.attached.sleeper.texts)
        return bool(self.attached.hand_off._arrived)

    def exchange(self, **step: Any) -> list[Lease]:
        return self.broker.exchange(Step(self.name, **step)).leases

    def take(self, count: int = 4, queues: Sequence[str] = (), **want: Any) -> list[str]:
        leases = self.exchange(want=Want(count, tuple(queues), **want))
        assert len(leases) <= count
        return [lease.open().id for lease in leases]

    def settle(self, lease: Lease) -> bool:
        verdict = Verdict(lease.token, Outcome.SUCCESS)
        return self.broker.exchange(Step(self.name, [verdict])).settled[0]


def named(job_id: str, priority: float = 0, **fields: Any) -> Envelope:
    return Envelope(**{"id": job_id, "task": "t", "rank": rank_of(priority), **fields})


def states(broker: Any, *ids: str) -> list[State | None]:
    return [record.state if record else None for record in broker.get_many(ids)]


def count_steps(broker: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many steps the server has done for the owner "w"; on Redis from now on, for all."""
    if isinstance(broker, RedisBroker):
        real, done = ServerConnection.run, list[str]()

        def run(line: ServerConnection, verb: str, *args: Any, **options: Any) -> Any:
            done.append(verb)
            return real(line, verb, *args, **options)

        monkeypatch.setattr(ServerConnection, "run", run)
        return lambda: len(done)
    schema = broker._session.address.schema
    text = (
        f'SELECT turn FROM "{schema}".pulse JOIN "{schema}".owner ON number = owner WHERE id = %s'
    )

    def turns() -> int:
        with connect(broker.url) as conn:
            return int(conn.execute(text, ["w"]).fetchone()[0])

    return turns
