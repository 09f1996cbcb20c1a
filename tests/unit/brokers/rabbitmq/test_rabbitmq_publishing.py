"""What RabbitMQ does not take: a queue is down, full or deaf, or the line is.

Each is said in one sentence with how much is stored, and holds up nothing that goes elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from harness import SLACK, eventually
from rabbitmq_desk import LiveOwner, away, ids_of, job, open_rabbit, suspended
from servers import RabbitMQ

from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.rabbitmq import RabbitBroker, queue_registry
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Owner, State
from tidemill.errors import BrokerUnavailable, InvalidOption

Open = Callable[..., RabbitBroker]


@pytest.fixture
def url(server: RabbitMQ) -> str:
    return server.url


class Put:
    """A put in a thread of its own, and what came of it."""

    def __init__(
        self, broker: RabbitBroker, jobs: list[Envelope], until: Callable[[], bool] = lambda: True
    ) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(broker, jobs, until), daemon=True)
        self._thread.start()

    def _run(self, broker: RabbitBroker, jobs: list[Envelope], until: Callable[[], bool]) -> None:
        try:
            broker.put(jobs)
            while not until():
                broker.put(jobs)
        except Exception as error:
            self.error = error

    @property
    def is_over(self) -> bool:
        """Whether it has returned, or raised."""
        return not self._thread.is_alive()

    def end(self) -> str:
        """What it raised."""
        self._thread.join(60)
        assert self.is_over
        return str(self.error or "")


def place(prefix: str, queue: str) -> str:
    return f"{prefix}.tasks.normal.{queue}"


def ready(broker: RabbitBroker) -> dict[str, int]:
    """What lies in each queue, as the queues themselves say."""
    return {row.name: row.ready for row in broker.stats()}


@pytest.mark.parametrize("how", [away, suspended])
def test_a_queue_that_is_down_holds_up_nothing_that_goes_elsewhere(
    server: RabbitMQ, open_one: Open, prefix: str, how: Callable[..., Iterator[None]]
) -> None:
    producer = open_one(patience=20)
    producer.put([job("down"), job("known")])
    server.sync()
    with how(server, place(prefix, "down")):
        other = open_one(patience=60)  # knows nothing of it yet, as little as of the next queue
        late = Put(other, [job("down")])
        broken = Put(producer, [job("down"), job("down")])
        # when
        for broker in (producer, other):
            for queue in ("known", f"new{id(broker)}"):
                broker.put([job(queue), job(queue, delay=0.01)])
        # then
        assert not late.is_over
        said = broken.end()
        assert f"the queue {place(prefix, 'down')}" in said, said
        assert "does not answer" in said, said
        assert isinstance(broken.error, BrokerUnavailable)
    assert late.end() == ""


def test_how_much_of_a_batch_was_stored_is_said(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    open_one(patience=60).put([job("full"), job("free")])
    broker = open_one(patience=8)
    policy(server, prefix, "full", 30)
    with pytest.raises(BrokerUnavailable, match="refused a message") as caught:
        broker.put([job("full") for _ in range(5000)])
    stored = ready(broker)["full"] - 1
    assert 0 < stored < 5000
    assert str(caught.value).endswith(f"; {stored} of 5000 were stored")
    # and where it is full from the start
    with pytest.raises(BrokerUnavailable, match="; nothing was stored"):
        broker.put([job("full")])
    with (
        suspended(server, place(prefix, "free")),
        pytest.raises(BrokerUnavailable, match="; 0 of 2 were stored, and 2 more may be"),
    ):
        broker.put([job("free") for _ in range(2)])


def policy(server: RabbitMQ, prefix: str, queue: str, most: int) -> None:
    says = f'{{"max-length": {most}, "overflow": "reject-publish"}}'
    pattern = f"^{place(prefix, queue)}$"
    server.ctl("set_policy", prefix + queue, pattern, says, "--apply-to", "queues")


def test_a_confirmed_message_is_not_sent_again(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    # law 3: of what takes the place of a message, one queue takes its part and another does not
    broker = open_one()
    broker.put([job("full"), job("full"), job("free")])
    policy(server, prefix, "full", 1)
    jobs = [job("free"), job("full"), job("free")]
    stored = threading.Event()
    broker._publisher.send([broker._writer.write_new(one, 0.0) for one in jobs], stored.set)
    assert not stored.wait(5)  # it was refused, and sent again
    policy(server, prefix, "full", 100)
    assert stored.wait(30)
    assert ready(broker) == {"free": 1 + 2, "full": 2 + 1}


def test_names_are_written_again_as_long_as_they_are_used(
    server: RabbitMQ, open_one: Open, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The stream keeps the last names only: here it loses all at once.
    monkeypatch.setattr(queue_registry, "_EVERY", 0.5)
    producer, consumer = open_one(), open_one()
    producer.put([job("waits")])
    LiveOwner(consumer, queues=("served",))
    server.delete_queue(f"{prefix}.queues")

    def names() -> set[str]:
        looker = open_rabbit(server.url, prefix)
        try:
            return {row.name for row in looker.stats()}
        finally:
            looker.close()

    eventually(lambda: {"waits", "served"} <= names(), "their names")


def fail(broker: RabbitBroker, jobs: list[Envelope]) -> None:
    broker.put(jobs)
    worker = LiveOwner(broker)
    for lease in worker.await_all(len(jobs), queues=("default",)):
        assert worker.settle(lease, Outcome.FAIL, error="no")
    eventually(lambda: broker.info()["failed"] == len(jobs), "their end")
    broker.detach(worker.id)


def test_a_retried_job_goes_to_a_queue_that_workers_find(
    server: RabbitMQ, open_one: Open, prefix: str
) -> None:
    given = job(retries=0)
    fail(open_one(), [given])
    server.delete_queue(f"{prefix}.queues")
    assert open_one().retry([given.id]) == [True]
    assert ready(open_one()) == {"default": 1}


def test_pages_of_failed_jobs_skip_no_job_when_jobs_are_retried(open_one: Open) -> None:
    # given six failed jobs, which are read two at a time
    broker = open_one()
    jobs = [job(retries=0) for _ in range(6)]
    fail(broker, jobs)
    what, cursor, found = Filter(states=frozenset({State.FAILED})), "", list[str]()
    # when each page is retried, and another caller begins to read meanwhile
    while True:
        page = broker.find(what, 2, cursor)
        ids = [record.envelope.id for record in page.records]
        found += ids
        assert broker.retry(ids[:1]) == [True]
        broker.find(what, 100, "")
        cursor = page.cursor
        if not cursor:
            break
    # then every job was shown once
    assert found == ids_of(jobs)[::-1]


def test_a_name_that_cannot_be_stops_nobody_who_serves_all_queues(open_one: Open) -> None:
    one, named = open_one(), job("a*#")
    with pytest.raises(InvalidOption, match="reads as a pattern"):
        one.put([job(), named])
    assert one.stats() == []
    one.put([job()])
    one._publish([one._registry.entry("b.#")])  # as others might
    other = open_one()
    other.attach(Owner(id="w", kind="worker"))
    assert [row.name for row in other.stats()] == ["default"]


def test_a_put_ends_within_patience_while_the_server_is_stopped(
    server: RabbitMQ, open_one: Open
) -> None:
    # law 16
    broker = open_one(patience=3)
    broker.put([job("stopped")])
    began = time.monotonic()
    with server.stalled(), pytest.raises(BrokerUnavailable):
        broker.put([job("stopped")])
    took = time.monotonic() - began
    assert took < 3 + SLACK, f"patience=3, and it took {took:.1f} s"
    # The server may have got the job before it was stopped, and stores it once at most.
    last = open_one(patience=60)
    last.put([job("stopped")])
    server.sync()
    assert ready(last)["stopped"] in (2, 3)
