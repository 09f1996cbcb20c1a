"""Flows on Redis that are too long for one call: done in pieces, whatever comes in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from servers import Redis

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.core.envelope import Envelope, Links
from tidemill.core.job import Outcome, Owner, Record, State, Verdict

MANY = 2500  # more than two calls follow
Open = Callable[..., RedisBroker]


def job(job_id: str, *behind: str, waits: str = "", **fields: Any) -> Envelope:
    inputs = tuple(fields.pop("inputs", ()))
    links = Links(next=behind, waits=waits, inputs=inputs)
    return Envelope(id=job_id, task="t", links=links, **fields)


def name(number: int) -> str:
    return f"j{number:05}"


def put_chain(broker: RedisBroker) -> None:
    """One after the other, the last first."""
    last = job(name(MANY - 1), waits="success")
    rest = [job(name(n), name(n + 1), waits="success") for n in range(MANY - 2, 0, -1)]
    broker.put([last, *rest, job(name(0), name(1))])


def settle(broker: RedisBroker, outcome: Outcome, **fields: Any) -> float:
    """Run the next job; seconds until something is due then."""
    broker.attach(Owner(id="w", name="w"))
    [lease] = broker.exchange(Step("w", want=Want(1))).leases
    reply = broker.exchange(Step("w", [Verdict(lease.token, outcome, **fields)]))
    assert reply.settled == [True]
    return reply.next_due


def counts(broker: RedisBroker) -> tuple[int, int]:
    """How many wait, and how many were cancelled."""
    [row] = broker.stats()
    return row.waiting, row.cancelled


def get(broker: RedisBroker, job_id: str) -> Record:
    return broker.get(job_id)


def test_a_long_fall_is_gone_on_with_by_whoever_comes_next(open_one: Open) -> None:
    # law 3: and at once, since it is due
    broker, other = open_one(), open_one()
    put_chain(broker)
    assert settle(broker, Outcome.FAIL) == 0
    waiting, cancelled = counts(broker)
    assert waiting + cancelled == MANY - 1
    assert 500 < waiting < MANY - 500  # some in this call, some left
    # then
    other.attach(Owner(id="o", name="o"))
    assert other.exchange(Step("o")).next_due == 0
    assert counts(broker)[0] < waiting
    assert other.exchange(Step("o")).next_due > 0
    assert counts(broker) == (0, MANY - 1)


def test_a_server_killed_in_a_long_fall_goes_on_with_it(durable: Redis, open_one: Open) -> None:
    # laws 1, 3
    broker = open_one(durable.url)
    put_chain(broker)
    settle(broker, Outcome.FAIL)
    before = counts(broker)
    assert before[0] > 0
    durable.kill()
    durable.start()
    assert counts(broker) == before
    broker.tick()
    assert counts(broker) == (0, MANY - 1)


def test_what_is_made_ready_again_in_the_middle_of_its_fall_is_counted_in_order(
    broker: RedisBroker,
) -> None:
    put_chain(broker)
    settle(broker, Outcome.FAIL)
    waiting, cancelled = counts(broker)
    assert waiting > 0
    # a job that fell is refused: the job before it did not succeed
    assert broker.retry([name(cancelled)]) == [False]
    assert broker.retry([name(0)]) == [True]
    assert counts(broker)[0] == MANY - 1
    for n in (1, 2, cancelled, MANY - 1):
        record = get(broker, name(n))
        assert (record.state, record.pending, record.failures) == (State.WAITING, 1, 0)
    # and when it is cancelled, all of it is in the call
    assert broker.cancel([name(0)]) == [True]
    assert counts(broker)[0] == 0


def test_a_store_is_sealed_when_nothing_is_left_to_count_down(broker: RedisBroker) -> None:
    # what is copied would wait for ever
    put_chain(broker)
    settle(broker, Outcome.FAIL)
    assert counts(broker)[0] > 0
    assert broker.depart("lmdb:///elsewhere", seal=True).sealed
    assert counts(broker) == (0, MANY - 1)


def test_an_act_whose_reply_was_lost_tells_what_it_did_and_is_gone_on_with(
    broker: RedisBroker, lose_replies: Callable[[int], None]
) -> None:
    # law 4
    put_chain(broker)
    lose_replies(1)
    assert broker.cancel([name(0)]) == [True]
    assert counts(broker) == (0, MANY)


def test_a_lease_whose_reply_was_lost_brings_its_inputs(
    broker: RedisBroker, lose_replies: Callable[[int], None]
) -> None:
    # law 4, case C1
    broker.put([job("b", waits="success", inputs=["a"]), job("a", "b")])
    settle(broker, Outcome.SUCCESS, result=b"one")
    lose_replies(1)
    [lease] = broker.exchange(Step("w", want=Want(1))).leases
    assert [(i.id, i.state, i.result) for i in lease.inputs] == [("a", "succeeded", b"one")]
