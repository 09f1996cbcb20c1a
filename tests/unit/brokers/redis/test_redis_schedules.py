"""Schedules on Redis: replies that are lost, and a server that is full."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from moved_clock import MovedClock
from servers import Redis

from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.schedules import CLAIM, Change
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable, StoreFull


@pytest.fixture
def server() -> Iterator[Redis]:
    with contextlib.closing(Redis()) as server:
        yield server


def job(**fields: Any) -> Envelope:
    return Envelope(**{"id": "j", "task": "t", **fields})


@pytest.mark.usefixtures("worker")
def test_a_change_whose_reply_was_lost_is_made_once(
    broker: RedisBroker, lose_replies: Callable[[int], None]
) -> None:
    # law 4, case C7
    [made] = broker.change_schedules([Change("s", 0, clock.wall() - 1)])
    lose_replies(1)
    [fired] = broker.change_schedules([Change("s", made.version, 0.0, b"", jobs=(job(),))])
    assert (fired.done, fired.left_out) == (True, ())
    [record] = broker.schedules(["s"])
    assert record.version == fired.version
    assert broker.stats()[0].accepted == 1


@pytest.mark.usefixtures("worker")
def test_a_schedule_handed_out_with_a_lost_reply_comes_again(
    broker: RedisBroker, lose_replies: Callable[[int], None], moved_clock: MovedClock
) -> None:
    # case C7: when its claim is over
    broker.exchange(Step("w"))  # its line is open
    broker.change_schedules([Change("s", 0, clock.wall() - 1)])
    lose_replies(2)  # it is tried twice before it is given up for now
    with pytest.raises(BrokerUnavailable):
        broker.exchange(Step("w", fires=5))
    reply = broker.exchange(Step("w", fires=5))
    assert reply.schedules == []
    assert 0 < reply.next_due <= CLAIM
    moved_clock.advance(CLAIM)
    [again] = broker.exchange(Step("w", fires=5)).schedules
    assert again.name == "s"


def test_a_full_server_fires_nothing_and_lets_schedules_be_paused(
    server: Redis, open_one: Callable[..., RedisBroker]
) -> None:
    # law 16
    broker = open_one(f"{server.url}?patience=0")
    broker.attach(Owner(id="w", name="w"))
    [made] = broker.change_schedules([Change("s", 0, clock.wall() - 1, b"rule")])
    server.run("CONFIG", "SET", "maxmemory", "1mb")
    with pytest.raises(StoreFull):
        broker.change_schedules([Change("s", made.version, 0.0, b"rule", jobs=(job(),))])
    [again] = broker.exchange(Step("w", fires=5)).schedules
    assert again.version == made.version
    [paused] = broker.change_schedules([Change("s", made.version, 0.0, b"paused")])
    assert paused.done
    assert broker.exchange(Step("w", fires=5)).next_due == float("inf")
