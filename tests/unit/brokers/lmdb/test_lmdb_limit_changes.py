"""A limit by name changes on LMDB: the change reaches all keys in one commit."""

from __future__ import annotations

import pytest
from lmdb_desk import commits

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Verdict
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.core.owner import Owner

pytestmark = pytest.mark.everyday

KEYS = 350
SLOTS = {count: LimitSettings(concurrency=count) for count in (1, 2, 3)}


@pytest.fixture
def broker(broker: LmdbBroker) -> LmdbBroker:
    broker.attach(Owner(id="w", name="w"))
    return broker


def put(
    broker: LmdbBroker, terms: LimitSettings, jobs: int = 1, keys: int = KEYS, tag: str = "j"
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


def take(broker: LmdbBroker, *verdicts: Verdict) -> list[int]:
    """Tokens of all that may start."""
    return [lease.token for lease in broker.exchange(Step("w", verdicts, Want(2000))).leases]


def test_a_change_reaches_all_keys_in_one_commit(broker: LmdbBroker) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=4)
    assert len(take(broker)) == KEYS
    before = commits(broker)
    broker.set_limit("api", SLOTS[2])
    assert commits(broker) - before == 1
    assert len(take(broker)) == KEYS
    # and so does a lower limit: no place is free before two of three have ended
    broker.set_limit("api", SLOTS[1])
    assert take(broker) == []


def test_a_put_that_changes_a_limit_reaches_all_keys(broker: LmdbBroker) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=2)
    assert len(take(broker)) == KEYS
    put(broker, SLOTS[2], keys=1, tag="new")
    assert len(take(broker)) == KEYS
    assert [row.terms for row in broker.limits()] == [SLOTS[2]]


def test_keys_that_are_new_in_the_commit_of_a_change_have_the_new_terms(broker: LmdbBroker) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=3)
    take(broker)
    new = JobLimit("api", "new", 1.0, SLOTS[3])
    broker.put([Envelope(id=f"new{n}", task="t", limit=new) for n in range(3)])
    assert len(take(broker)) == 2 * KEYS + 3


def test_tokens_stay_as_far_as_they_fit_in_all_keys(broker: LmdbBroker) -> None:
    # law 13: one token of two is spent, and the new bucket holds three
    hourly = LimitSettings(rate=(1, 3600.0), burst=2)
    put(broker, hourly, jobs=6)
    tokens = take(broker)
    assert len(tokens) == 2 * KEYS
    put(broker, hourly, keys=1, tag="again")
    broker.set_limit("api", LimitSettings(rate=(1, 1800.0), burst=3))
    assert take(broker, *(Verdict(token, Outcome.SUCCESS) for token in tokens)) == []
    broker.set_limit("api", LimitSettings(rate=(1, 3600.0), burst=1))
    assert take(broker) == []
    broker.set_limit("api", LimitSettings(concurrency=1))
    assert len(take(broker)) == KEYS
