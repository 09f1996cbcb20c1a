"""The delay queues of RabbitMQ: their arithmetic, and their bounds."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rabbitmq_desk import LiveOwner, job, open_rabbit
from servers import rabbitmq_url

from tidemill.brokers.rabbitmq import RabbitBroker, message
from tidemill.brokers.rabbitmq.due import (
    DIGITS,
    LEVELS,
    UNIT,
    DelayQueues,
    longest,
    split,
)
from tidemill.core.envelope import encode_envelope


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
    delays, digits = DelayQueues("p"), split(seconds)
    places = delays.waits(digits)
    exchange, key = delays.route(digits, "p.tasks.normal.a.b")
    # the first exchange is that of the highest digit, each queue leads to the next lower one
    assert exchange == delays.exchange(places[0][1])
    for place, level, digit in places:
        assert place.arguments["x-message-ttl"] == round(digit * DIGITS**level * UNIT * 1000)
        assert place.arguments["x-message-ttl"] < 2**32
        assert place.arguments["x-dead-letter-exchange"] == delays.exchange(level - 1)
    assert len(key.encode()) < 255
    assert key.endswith(".p.tasks.normal.a.b")


def matches(pattern: str, key: str) -> bool:
    """Whether a topic exchange of the server would send a message with this key there."""
    wanted, words = pattern.split("."), key.split(".")
    if wanted[-1] == "#":
        wanted.pop()
        words = words[: len(wanted)]
    pairs = zip(wanted, words, strict=False)
    return len(wanted) == len(words) and all(want in ("*", word) for want, word in pairs)


@given(st.floats(0.001, longest()))
def test_a_message_has_one_way_at_a_time_and_waits_for_each_of_its_digits(seconds: float) -> None:
    # laws 2, 9: two ways would be two jobs, none a lost one
    delays, digits, home = DelayQueues("p"), split(seconds), "p-tasks"
    exchange, key = delays.route(digits, home)
    levels = {delays.exchange(level): level for level in range(LEVELS)}
    queues = {place.name: place for place in delays.all_waits()}
    assert len(queues) == (DIGITS - 1) * (LEVELS - 1) + 11
    came_through, rest = [], length(digits)
    while exchange != delays.exchange(-1):
        level = levels[exchange]
        ways = [delays.exchange(level - 1)] if matches(DelayQueues.binding(level, 0), key) else []
        ways += [
            name
            for name in queues
            if name.startswith(f"{exchange}.")
            and matches(DelayQueues.binding(level, int(name.rsplit(".", 1)[1])), key)
        ]
        [to] = ways
        if to in queues:
            arguments = queues[to].arguments
            least, most = delays.left(queues[to], key)
            rest -= arguments["x-message-ttl"] / 1000
            assert (least, most) == (
                pytest.approx(rest, abs=1e-4),
                pytest.approx(rest + arguments["x-message-ttl"] / 1000, abs=1e-4),
            )
            came_through.append(to)
            to = arguments["x-dead-letter-exchange"]
        exchange = to
    assert came_through == [place.name for place, *_ in delays.waits(digits)]
    order = list(queues)
    assert sorted(came_through, key=order.index) == came_through
    assert rest == pytest.approx(0, abs=1e-4)


def test_there_are_no_more_queues_than_digits() -> None:
    # law 15: whatever the delays are
    names = {
        place.name
        for n in range(40_000)
        for place, *_ in DelayQueues("p").waits(split(UNIT * 1.13 ** (n / 200)))
    }
    assert len(names) <= 166


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[RabbitBroker]:
    broker = open_rabbit(rabbitmq_url(), f"d{time.time_ns() % 10**12}")
    yield broker
    broker.close()


def test_a_delay_longer_than_the_clock_goes_round_again(
    broker: RabbitBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 9: as if it held no more than 0.3 s
    monkeypatch.setattr(message, "longest", lambda: 0.3)
    monkeypatch.setattr(message, "split", lambda seconds: split(min(seconds, 0.3)))
    given, began = job(delay=1.0), time.monotonic()
    broker.put([given])
    worker = LiveOwner(broker)
    [lease] = worker.await_all(1)
    assert 1.0 <= time.monotonic() - began < 20
    assert (lease.open().id, lease.attempt) == (given.id, 1)
    assert lease.envelope == encode_envelope(given)


def test_delays_that_cross_levels_are_on_time(broker: RabbitBroker) -> None:
    # law 9, case Q14
    worker = LiveOwner(broker)
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
    assert min(early) > -15
