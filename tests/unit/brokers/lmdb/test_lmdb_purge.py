"""A purge on LMDB keeps nobody waiting, however many jobs other queues have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tidemill.brokers.lmdb import admin, purge
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.job import Envelope

MANY = 3000


def put(broker: LmdbBroker, prefix: str, count: int, **fields: object) -> None:
    names = [f"{prefix}{n:05}" for n in range(count)]
    broker.put([Envelope(id=name, task="t", **fields) for name in names])  # type: ignore[arg-type]


def test_a_purge_looks_at_no_job_of_others_while_it_writes(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a few jobs of a queue among many of another
    put(broker, "other", MANY, queue="others", delay=60)
    put(broker, "late", 20, queue="mine", delay=60)
    put(broker, "key", 20, queue="mine")
    loads: list[bytes] = []
    load = Transitions.load
    monkeypatch.setattr(Transitions, "load", lambda self, i: loads.append(i) or load(self, i))  # type: ignore[func-returns-value]
    # when that queue is purged
    assert broker.purge("mine") == 40
    # then no write transaction has read a job of the other
    assert not [job_id for job_id in loads if job_id.startswith(b"other")]
    assert {row.name: row.scheduled for row in broker.stats()} == {"mine": 0, "others": MANY}


def test_a_purge_is_many_short_commits(broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    put(broker, "late", MANY, queue="mine", delay=60)
    put(broker, "now", MANY, queue="mine")
    sizes: list[int] = []
    purge_some = admin._purge_some

    def count(commit: Transitions, queue: str, unready: Sequence[bytes] = ()) -> int:
        sizes.append(purge_some(commit, queue, unready))
        return sizes[-1]

    monkeypatch.setattr(admin, "_purge_some", count)
    assert broker.purge("mine") == 2 * MANY
    assert max(sizes) <= 1000


def test_no_read_transaction_of_a_purge_looks_at_everything(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(purge, "LOOK_MOST", 100)
    put(broker, "late", 350, queue="mine", delay=60)
    put(broker, "other", 350, queue="others", delay=60)
    assert broker.purge("mine") == 350
    assert [row.scheduled for row in broker.stats()] == [0, 350]
