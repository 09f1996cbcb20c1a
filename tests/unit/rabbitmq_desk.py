"""How tests drive brokers on a RabbitMQ of their own: owners, jobs, and what the server holds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers import RabbitMQ

from tidemill.brokers.base import Broker, Step, Want, open_broker
from tidemill.brokers.rabbitmq import RabbitBroker
from tidemill.errors import BrokerUnavailable
from tidemill.job import Envelope, Outcome, Verdict

sys.path.append(str(Path(__file__).parent.parent / "conformance"))

from seam import Hand, ids_of, job, message

__all__ = ["Hand", "Runner", "held", "ids_of", "job", "message", "open_rabbit", "put_until"]


def open_rabbit(url: str, prefix: str, **options: Any) -> RabbitBroker:
    """A broker on a server."""
    query = "&".join(f"{name}={value}" for name, value in {"prefix": prefix, **options}.items())
    broker = open_broker(f"{url}?{query}")
    assert isinstance(broker, RabbitBroker)
    return broker


def held(server: RabbitMQ, prefix: str) -> int:
    """How many jobs the server has under a prefix, ready, unacknowledged or delayed."""
    return sum(
        row["messages"]
        for name, row in server.queues().items()
        if name.startswith(f"{prefix}.") and name not in (f"{prefix}.queues", f"{prefix}.failed")
    )


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
        self._hand = Hand(broker)
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
