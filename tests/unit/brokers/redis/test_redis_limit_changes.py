"""A limit by name changes on Redis: the change is carried to its keys in pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings
from tidemill.core.job import Verdict

pytestmark = pytest.mark.usefixtures("worker")
KEYS = 350  # more than three calls reach
SLOTS = {count: LimitSettings(concurrency=count) for count in (1, 2, 3, 100)}


def put(
    broker: RedisBroker, terms: LimitSettings, jobs: int = 1, keys: int = KEYS, tag: str = "j"
) -> None:
    """Jobs of each key."""
    broker.put(
        [
            Envelope(
                id=f"{tag}{n}-{key}", task="t", limit=JobLimit("api", f"k{key:05}", 1.0, terms)
            )
            for n in range(jobs)
            for key in range(keys)
        ]
    )


def take(broker: RedisBroker, *verdicts: Verdict) -> list[int]:
    """Tokens of all that may start."""
    return [lease.token for lease in broker.exchange(Step("w", verdicts, Want(2000))).leases]


def one_piece(broker: RedisBroker, terms: LimitSettings) -> None:
    """Change the limit, and carry it no further than one call does."""
    broker._go_on = lambda lines: None  # type: ignore[method-assign]
    broker.set_limit("api", terms)
    del broker._go_on  # type: ignore[method-assign]


def test_a_change_has_reached_all_keys_when_it_returns(broker: RedisBroker) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=4)
    assert len(take(broker)) == KEYS
    broker.set_limit("api", SLOTS[2])
    assert len(take(broker)) == KEYS
    # and so has a lower limit: no place is free before two of three have ended
    broker.set_limit("api", SLOTS[1])
    assert take(broker) == []


def test_a_change_that_was_cut_short_is_finished_by_another(
    broker: RedisBroker, open_one: Callable[[], RedisBroker]
) -> None:
    # laws 3, 13
    put(broker, SLOTS[1], jobs=2)
    take(broker)
    one_piece(broker, SLOTS[2])
    key = broker._lines.key
    assert broker._lines.ask(b"HLEN", key + b":walk") == 1
    open_one().tick()
    assert broker._lines.ask(b"EXISTS", key + b":walk") == 0
    assert len(take(broker)) == KEYS


def test_keys_that_a_change_has_not_reached_keep_the_old_terms(broker: RedisBroker) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=3)
    take(broker)
    one_piece(broker, SLOTS[3])
    broker._lines.ask(b"ZREM", broker._lines.key + b":due", b"wapi")
    reached = len(take(broker)) // 2
    assert 0 < reached < KEYS
    # keys that are new have the terms of their place
    new = [(f"{n}", f"k{n}") for n in ("00000a", "99999")]
    claims = [(name, JobLimit("api", key, 1.0, SLOTS[3])) for name, key in new]
    jobs = [(name + tag, claim) for name, claim in claims for tag in "abc"]
    broker.put([Envelope(id=name, task="t", limit=claim) for name, claim in jobs])
    assert len(take(broker)) == 3 + 1
