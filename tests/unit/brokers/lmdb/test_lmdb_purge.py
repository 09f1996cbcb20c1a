"""A purge on LMDB keeps nobody waiting, however many jobs other queues have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tidemill.brokers.contract.admin import KeptPurge
from tidemill.brokers.lmdb import admin, kept_purges, purge
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.retention import KEPT_OTHER
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.core.job import State

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


def sizes_of_pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of jobs in the commits of purges that keep their jobs, from now on."""
    sizes: list[int] = []
    keep_some = kept_purges._keep_some

    def count(commit: Transitions, **arguments: object) -> int:
        sizes.append(keep_some(commit, **arguments))  # type: ignore[arg-type]
        return sizes[-1]

    monkeypatch.setattr(kept_purges, "_keep_some", count)
    return sizes


def test_a_purge_that_keeps_its_jobs_is_many_short_commits(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(broker, "late", MANY, queue="mine", delay=60)
    put(broker, "now", MANY, queue="mine")
    sizes = sizes_of_pieces(monkeypatch)
    assert broker.purge_kept("mine", "p1") == KeptPurge(2 * MANY)
    assert max(sizes) <= 1000
    assert sum(sizes) == 2 * MANY


def test_a_commit_of_a_purge_that_keeps_large_jobs_writes_few_bytes(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_purges, "_MOST_BYTES", 50_000)
    body = b"x" * 20_000
    for number in range(6):
        delay = 60 if number < 3 else 0
        broker.put([Envelope(id=f"job{number}", task="t", queue="mine", body=body, delay=delay)])
    broker.put([Envelope(id="huge", task="t", queue="mine", body=5 * body)])
    sizes = sizes_of_pieces(monkeypatch)
    assert broker.purge_kept("mine", "p1") == KeptPurge(7)
    assert max(sizes) == 2
    assert sum(sizes) == 7


def test_a_purged_job_that_an_older_release_retried_is_not_pruned(tmp_path: Path) -> None:
    # given a purged job
    broker = open_broker(f"lmdb://{tmp_path}/store?keep_failed=0")
    assert isinstance(broker, LmdbBroker)
    put(broker, "job", 1, queue="mine")
    broker.purge_kept("mine", "purge")
    # when it is retried, and its entry among the jobs to prune is left behind
    entries: list[tuple[bytes, bytes]] = []

    def read(commit: Transitions) -> None:
        entries.extend(commit.txn.cursor(commit.t.fin))

    def leave_behind(commit: Transitions) -> None:
        for key, value in entries:
            commit.txn.put(key, value, db=commit.t.fin)
        commit.kept[KEPT_OTHER] += 1

    broker._commit(read)
    assert broker.kick(["job00000"]) == [True]
    broker._commit(leave_behind)
    # then the entry goes when its time has come, and the job stays
    broker.tick()
    entries.clear()
    broker._commit(read)
    assert entries == []
    record = broker.get("job00000")
    assert record is not None
    assert record.state == State.READY
    broker.close()
