"""Limits on Redis: replies that are lost, and a server that is killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from servers import Redis

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings
from tidemill.core.job import Outcome, Owner, Verdict


def put(broker: RedisBroker, count: int, prefix: str = "j", **fields: Any) -> None:
    broker.put([Envelope(id=f"{prefix}{n:05}", task="t", **fields) for n in range(count)])


def take(broker: RedisBroker, count: int, *verdicts: Verdict) -> list[int]:
    """Tokens of what is leased."""
    return [lease.token for lease in broker.exchange(Step("w", verdicts, Want(count))).leases]


def test_a_server_that_was_killed_knows_its_limits(
    durable: Redis, open_one: Callable[..., RedisBroker]
) -> None:
    # laws 1, 13
    broker = open_one(durable.url)
    broker.attach(Owner(id="w", name="w"))
    broker.set_limit("a", LimitSettings(rate=(1, 3600), burst=2), queue=True)
    put(broker, 5, queue="a")
    put(broker, 5, "lane", queue="b", limit=JobLimit("api", "k", 1.0, LimitSettings(concurrency=1)))
    first = take(broker, 10)
    assert len(first) == 3
    durable.kill()
    durable.start()
    assert take(broker, 10) == []
    assert [row.running for row in broker.limits()] == [2, 1]
    verdicts = [Verdict(token, Outcome.SUCCESS) for token in first]
    assert len(take(broker, 10, *verdicts)) == 1


@pytest.mark.usefixtures("worker")
def test_a_step_whose_reply_was_lost_takes_its_tokens_once(
    broker: RedisBroker, lose_replies: Callable[[int], None]
) -> None:
    # laws 4, 13
    broker.set_limit("a", LimitSettings(rate=(1, 3600), burst=3), queue=True)
    put(broker, 5, queue="a")
    take(broker, 0)  # its line is open
    lose_replies(1)
    assert len(take(broker, 2)) == 2
    assert len(take(broker, 2)) == 1


def test_a_limit_whose_change_was_lost_on_the_way_back_is_changed_once(
    broker: RedisBroker, lose_replies: Callable[[int], None]
) -> None:
    # law 4
    lose_replies(1)
    broker.set_limit("api", LimitSettings(rate=(2, 7), window=(3, 5.5), breaker=(4, 1.5)))
    [row] = broker.limits()
    assert row.terms == LimitSettings(rate=(2, 7), window=(3, 5.5), breaker=(4, 1.5))
