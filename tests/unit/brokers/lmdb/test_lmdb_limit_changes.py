"""A limit by name changes on LMDB: the change reaches its keys in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from lmdb_desk import Process, commits

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb import partitions
from tidemill.brokers.lmdb.admin import set_limit
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.layout import DUE_KEY, DUE_TERMS
from tidemill.brokers.lmdb.limits import LIMITS, read_limited
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Verdict
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.core.owner import Owner

pytestmark = pytest.mark.everyday

KEYS, PIECE = 350, 100
SLOTS = {count: LimitSettings(concurrency=count) for count in (1, 2, 3, 100)}


@pytest.fixture
def broker(broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch) -> LmdbBroker:
    monkeypatch.setattr(partitions, "CHANGE_MOST", PIECE)
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


def pieces(broker: LmdbBroker, terms: LimitSettings, count: int = 1) -> None:
    """Change the limit, and have that reach no more keys than so many pieces do."""

    def alone(commit: Transitions) -> None:
        set_limit(commit, "api", terms, queue=False, declared=False)
        for _ in range(count - 1):
            commit.limiters.go_on("api")

    broker._commit(alone)


def is_changing(broker: LmdbBroker) -> bool:
    with broker._store.reading_txn() as txn:
        limited = read_limited(broker._store, txn, LIMITS + "api")
        assert limited is not None
        return bool(limited.behind)


def drop_calls(broker: LmdbBroker) -> None:
    """Delete the entries that call other processes to go on."""
    due = broker._store.tables.due
    with broker._store.env.begin(write=True) as txn:
        for key, _ in list(txn.cursor(due)):
            if DUE_KEY.unpack(key)[2] == DUE_TERMS:
                txn.delete(key, db=due)


def test_a_change_has_reached_all_keys_when_it_returns(broker: LmdbBroker) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=4)
    assert len(take(broker)) == KEYS
    before = commits(broker)
    broker.set_limit("api", SLOTS[2])
    assert commits(broker) - before >= KEYS // PIECE
    assert len(take(broker)) == KEYS
    # and so has a lower limit: no place is free before two of three have ended
    broker.set_limit("api", SLOTS[1])
    assert take(broker) == []


def test_no_commit_of_a_change_touches_more_keys_than_a_piece(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[int] = []
    real = partitions.Partitions.write

    def write(self: partitions.Partitions) -> None:
        touched.append(len(self._dirty))
        real(self)

    put(broker, SLOTS[1], jobs=2)
    take(broker)
    monkeypatch.setattr(partitions.Partitions, "write", write)
    put(broker, SLOTS[3], keys=1, tag="new")
    broker.tick()
    assert not is_changing(broker)
    assert sum(touched) == KEYS
    assert max(touched) == PIECE
    touched.clear()
    broker.set_limit("api", SLOTS[2])
    assert max(touched) == PIECE


def test_a_put_that_changes_a_limit_reaches_all_keys_soon(broker: LmdbBroker) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=2)
    assert len(take(broker)) == KEYS
    put(broker, SLOTS[2], keys=1, tag="new")
    assert is_changing(broker)
    started = 0
    for _ in range(10):  # what is left of the change is the next task of whoever comes
        reply = broker.exchange(Step("w", want=Want(2000)))
        assert not is_changing(broker) or reply.next_due == 0
        started += len(reply.leases)
    assert started == KEYS
    assert [row.terms for row in broker.limits()] == [SLOTS[2]]


def test_a_change_whose_process_was_killed_is_finished_by_another(
    broker: LmdbBroker, url: str
) -> None:
    # laws 3, 13
    put(broker, SLOTS[1], jobs=2)
    assert len(take(broker)) == KEYS
    code = f"""
    from tidemill.core import crash_points
    from tidemill.brokers.lmdb import partitions
    from tidemill.core.limit_settings import LimitSettings
    partitions.CHANGE_MOST = {PIECE}
    crash_points._NAME, crash_points._left = "store.terms", 3
    broker.set_limit("api", LimitSettings(concurrency=2))
    say("not killed")
    """
    with Process(url, code) as other:
        other.expect("")
    assert is_changing(broker)
    assert sum(len(take(broker)) for _ in range(10)) == KEYS
    assert not is_changing(broker)


def test_keys_that_a_change_has_not_reached_keep_the_old_terms(broker: LmdbBroker) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=3)
    take(broker)
    pieces(broker, SLOTS[3])
    drop_calls(broker)
    assert len(take(broker)) == 2 * PIECE
    # keys that are new have the terms of their place
    new = [(f"{n}", f"k{n}") for n in ("00000a", "99999")]
    claims = [(name, JobLimit("api", key, 1.0, SLOTS[3])) for name, key in new]
    jobs = [(name + tag, claim) for name, claim in claims for tag in "abc"]
    broker.put([Envelope(id=name, task="t", limit=claim) for name, claim in jobs])
    assert len(take(broker)) == 3 + 1
    held = broker.held("99999b")
    assert held is not None
    assert held.terms == SLOTS[1]


@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("counts", [(1, 1, 1), (3, 2, 1), (1, 2, 3), (2, 3, 1)])
def test_a_limit_may_change_while_a_change_is_under_way(
    broker: LmdbBroker, last: int, counts: Any
) -> None:
    # law 13
    put(broker, SLOTS[1], jobs=4)
    take(broker)
    for terms, count in zip((100, 2, 100), counts, strict=True):
        pieces(broker, SLOTS[terms], count)
    broker.set_limit("api", SLOTS[last])
    assert not is_changing(broker)
    assert len(take(broker)) == (last - 1) * KEYS


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


def test_two_declarations_in_turns_leave_few_terms_behind(broker: LmdbBroker) -> None:
    # two releases of an app that declare a limit differently, while nobody works
    put(broker, SLOTS[1], jobs=2)
    for n in range(40):
        put(broker, SLOTS[2 + n % 2], keys=1, tag=f"turn{n}-")
    with broker._store.reading_txn() as txn:
        limited = read_limited(broker._store, txn, LIMITS + "api")
        calls = [key for key, _ in txn.cursor(broker._store.tables.due)]
    assert limited is not None
    assert len(limited.behind) <= 2
    assert len(calls) == 1


def test_a_job_whose_id_is_the_name_of_a_limit_is_left_alone(broker: LmdbBroker) -> None:
    put(broker, SLOTS[1], jobs=2)
    pieces(broker, SLOTS[2])
    with broker._store.reading_txn() as txn:
        due = txn.cursor(broker._store.tables.due)
        references = [value for key, value in due if DUE_KEY.unpack(key)[2] == DUE_TERMS]
    assert references == [b"api\0"]


def test_lists_of_limits_go_on_while_one_changes(broker: LmdbBroker, url: str) -> None:
    put(broker, SLOTS[1], jobs=2)
    pieces(broker, SLOTS[2])
    other = open_broker(url)
    assert [(row.terms, row.keys) for row in other.limits()] == [(SLOTS[2], KEYS)]
    other.close()
