"""The clock of queues in which RabbitMQ keeps what is not due: its arithmetic, and its bounds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rabbitmq_desk import Hand, job, open_rabbit
from servers import rabbitmq_url

from tidemill.brokers.rabbitmq import RabbitBroker, message
from tidemill.brokers.rabbitmq.delays import (
    DIGITS,
    LEVELS,
    UNIT,
    Clockwork,
    longest,
    split,
)
from tidemill.job import encode_envelope


def length(digits: tuple[int, ...]) -> float:
    """Seconds that a message waits, all in all."""
    values = zip(range(LEVELS - 1, -1, -1), digits, strict=True)
    return sum(digit * DIGITS**level for level, digit in values) * UNIT


@given(st.floats(0.0, 2 * longest(), exclude_min=True))
def test_a_delay_is_never_shorter_and_hardly_longer(seconds: float) -> None:
    # law 9
    digits = split(seconds)
    waits = length(digits)
    coarse = UNIT * DIGITS if seconds >= 3600 else UNIT
    assert min(seconds, longest()) - 1e-6 <= waits <= max(seconds, UNIT) + coarse + 1e-6
    assert waits <= longest()
    assert any(digits)
    assert all(0 <= digit < DIGITS for digit in digits)


@given(st.floats(0.001, longest()))
def test_the_way_of_a_message_is_that_of_its_digits(seconds: float) -> None:
    clockwork, digits = Clockwork("p"), split(seconds)
    places = clockwork.waits(digits)
    exchange, key = clockwork.route(digits, "p.tasks.normal.a.b")
    # the first exchange is that of the highest digit, each queue leads to the next lower one
    assert exchange == clockwork.exchange(places[0][1])
    for place, level, digit in places:
        assert place.arguments["x-message-ttl"] == round(digit * DIGITS**level * UNIT * 1000)
        assert place.arguments["x-message-ttl"] < 2**32
        assert place.arguments["x-dead-letter-exchange"] == clockwork.exchange(level - 1)
    assert len(key.encode()) < 255
    assert key.endswith(".p.tasks.normal.a.b")


def test_there_are_no_more_queues_than_digits() -> None:
    # law 15: whatever the delays are
    names = {
        place.name
        for n in range(40_000)
        for place, *_ in Clockwork("p").waits(split(UNIT * 1.13 ** (n / 200)))
    }
    assert len(names) <= 166


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[RabbitBroker]:
    broker = open_rabbit(rabbitmq_url(), f"d{time.time_ns() % 10**12}")
    yield broker
    broker.close()


def test_what_the_clock_cannot_hold_at_once_goes_round_again(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 9: as if it held no more than 0.3 s
    monkeypatch.setattr(message, "longest", lambda: 0.3)
    monkeypatch.setattr(message, "split", lambda seconds: split(min(seconds, 0.3)))
    given, began = job(delay=1.0), time.monotonic()
    broker.put([given])
    worker = Hand(broker)
    [lease] = worker.await_all(1)
    assert 1.0 <= time.monotonic() - began < 10
    assert (lease.open().id, lease.attempt) == (given.id, 1)
    assert lease.envelope == encode_envelope(given)


def test_delays_that_cross_levels_are_on_time(broker: RabbitBroker) -> None:
    # law 9, case Q14
    worker = Hand(broker)
    worker.take()
    due: dict[str, float] = {}
    for delay in (0.02, 0.31, 0.32, 0.33, 0.64, 1.0):
        late = job(delay=delay)
        due[late.id] = time.monotonic() + delay
        broker.put([late])
    early = []
    for _ in due:
        [lease] = worker.await_all(1)
        early.append(due[lease.open().id] - time.monotonic())
    assert max(early) <= 0
    assert min(early) > -5
