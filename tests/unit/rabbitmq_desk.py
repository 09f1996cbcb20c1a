"""How tests drive brokers on a RabbitMQ of their own: owners, jobs, and what the server holds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from servers import RabbitMQ

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Verdict
from tidemill.errors import BrokerUnavailable

sys.path.append(str(Path(__file__).parent.parent / "conformance"))

from broker_driver import LiveOwner, ids_of, job, message

__all__ = [
    "LiveOwner",
    "Runner",
    "away",
    "held",
    "ids_of",
    "job",
    "message",
    "open_rabbit",
    "put_until",
    "suspended",
]


def open_rabbit(url: str, prefix: str, **options: Any) -> RabbitBroker:
    """A broker on a server."""
    query = "&".join(f"{name}={value}" for name, value in {"prefix": prefix, **options}.items())
    return open_broker(f"{url}?{query}")


def held(server: RabbitMQ, prefix: str) -> int:
    """How many jobs the server has under a prefix, ready, unacknowledged or delayed."""
    return sum(
        row["messages"]
        for name, row in server.queues().items()
        if name.startswith(f"{prefix}.") and name not in (f"{prefix}.queues", f"{prefix}.failed")
    )


@contextlib.contextmanager
def suspended(server: RabbitMQ, name: str) -> Iterator[None]:
    """A quorum queue that answers nobody, as one does whose log was lost with its server."""
    process = f"'%2F_{name}'"
    server.eval(f"sys:suspend({process})")
    try:
        yield
    finally:
        server.eval(f"sys:resume({process})")


@contextlib.contextmanager
def away(server: RabbitMQ, name: str) -> Iterator[None]:
    """A queue that the server says is down, as one does whose node is away."""
    resource = f'rabbit_misc:r(<<"/">>, queue, <<"{name}">>)'
    server.eval(f"mnesia:dirty_delete(rabbit_queue, {resource})")
    try:
        yield
    finally:
        known = f"[Q] = mnesia:dirty_read(rabbit_durable_queue, {resource})"
        server.eval(known, "mnesia:dirty_write(rabbit_queue, Q)")


def put_until(broker: Broker, jobs: Sequence[Envelope]) -> None:
    """Put, as often as it takes."""
    while True:
        try:
            broker.put(jobs)
        except BrokerUnavailable:
            continue
        return


class Runner:
    """A worker in a thread: whatever it is handed succeeds."""

    def __init__(self, broker: Broker, **want: Any) -> None:
        self._hand = LiveOwner(broker)
        self._want = Want(8, **want)
        self.ran: list[str] = []
        self._over = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        broker, verdicts = self._hand.broker, list[Verdict]()
        while not self._over:
            reply = broker.exchange(Step(self._hand.id, verdicts, self._want))
            self.ran += [lease.open().id for lease in reply.leases]
            verdicts = [Verdict(lease.token, Outcome.SUCCESS) for lease in reply.leases]
            if not reply.leases:
                broker.wait(self._hand.id, 0.5)

    def stop(self) -> None:
        """No more."""
        self._over = True
        self._hand.broker.wake(self._hand.id)
        self._thread.join(20)
        assert not self._thread.is_alive()
