"""History on LMDB: one write for each row and commit, and short walks."""

from __future__ import annotations

import pytest

from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.history_rows import HOUR, KEEP, MINUTE, HistoryRow
from tidemill.brokers.lmdb import broker as lmdb_broker
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.look import history
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.clock import clock
from tidemill.core.owner import Owner

NOW = int(clock.wall()) // HOUR * HOUR


def test_rows_of_one_commit_are_summed_and_written_once(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = history.write_history

    def count(commit: Transitions) -> None:
        written.append(len(commit.history))
        write(commit)

    monkeypatch.setattr("tidemill.brokers.lmdb.transitions.write_history", count)
    broker.attach(Owner(id="w", kind="worker"))
    rows = [HistoryRow("task", "a", MINUTE, NOW, (1, n)) for n in range(50)]
    written.clear()
    broker.exchange(Step("w", history=rows))
    assert written == [1]
    assert broker.history("task", MINUTE) == [HistoryRow("task", "a", MINUTE, NOW, (50, 1225))]


def test_old_rows_are_deleted_by_many_short_commits(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_broker, "_PRUNE_MOST", 100)
    pruned: list[int] = []

    def count(commit: Transitions, most: int) -> int:
        pruned.append(history.prune_history(commit, most))
        return pruned[-1]

    monkeypatch.setattr(lmdb_broker, "prune_history", count)
    old = NOW - KEEP[MINUTE] - HOUR
    kinds = ("failure", "queue", "task")
    broker.keep_history(
        [HistoryRow(kind, str(n), MINUTE, old, (1,)) for kind in kinds for n in range(150)]
    )
    broker.tick()
    assert pruned == [100, 100, 100, 100, 50]
    assert not [row for kind in kinds for row in broker.history(kind, MINUTE)]
