"""History on Redis: steps append rows, and clients store their sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers import redis_url

from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.history_rows import HOUR, KEEP, MINUTE, HistoryRow
from tidemill.brokers.redis import history
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.connections import ServerConnection
from tidemill.brokers.registry import open_broker
from tidemill.brokers.shared import folded_history
from tidemill.core.clock import clock, new_id
from tidemill.core.owner import Owner

NOW = int(clock.wall()) // HOUR * HOUR


@pytest.fixture
def broker() -> Iterator[RedisBroker]:
    broker = open_broker(f"{redis_url()}?prefix=t{new_id()}")
    assert isinstance(broker, RedisBroker)
    broker.attach(Owner(id="w", kind="worker"))
    yield broker
    broker.close()


def row(*counts: int, name: str = "a", at: int = NOW, sample: bytes = b"") -> HistoryRow:
    return HistoryRow("task", name, MINUTE, at, counts, sample)


def keys(broker: RedisBroker) -> set[bytes]:
    """The keys of history, without the store's hash tag."""
    found = broker._lines.ask(b"KEYS", broker._lines.key.replace(b"{", b"\\{") + b":*")
    names = (name.partition(b"}:")[2] for name in found)
    return {name for name in names if name.startswith((b"counts", b"sums", b"periods", b"kinds"))}


def test_added_rows_are_folded_into_sums(
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folded_history, "FOLD_MOST", 3)
    broker.keep_history([row(100), row(5, name="kept")])
    for n in range(5):
        broker.exchange(Step("w", history=[row(1, n, sample=b"%d" % n), row(n, name="b")]))
    before = broker.history("task", MINUTE)
    assert b"counts" in keys(broker)

    broker.tick()

    assert keys(broker) == {b"sums:60:%d:task" % NOW, b"periods:60:task", b"kinds"}
    assert broker.history("task", MINUTE) == before
    assert before[0] == row(105, 10, sample=b"4")


def test_sums_that_another_client_changes_meanwhile_are_read_again(
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.exchange(Step("w", history=[row(1), row(1, name="b")]))
    add = folded_history.added

    def late(before: HistoryRow | None, one: HistoryRow) -> HistoryRow:
        monkeypatch.setattr(folded_history, "added", add)
        broker.keep_history([row(50)])  # after the fold has read its rows
        broker.exchange(Step("w", history=[row(7), row(8, name="b")]))
        return add(before, one)

    monkeypatch.setattr(folded_history, "added", late)
    broker._history.fold()

    assert broker.history("task", MINUTE) == [row(57), row(9, name="b")]
    assert b"counts" not in keys(broker)


def test_a_worker_that_adds_many_rows_folds_them_before_the_housekeeping(
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folded_history, "FOLD_MOST", 4)
    broker.wait("w", 0.0)
    broker.exchange(Step("w", history=[row(1)] * 3))
    broker.wait("w", 0.0)
    assert b"counts" in keys(broker)
    broker.exchange(Step("w", history=[row(1)]))
    broker.wait("w", 0.0)
    assert b"counts" not in keys(broker)
    assert broker.history("task", MINUTE) == [row(4)]


def test_many_periods_are_read_by_several_calls(
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_PERIODS_MOST", 3)
    rows = [row(n, at=NOW + n * 60) for n in range(1, 8)]
    broker.keep_history(rows)
    broker.exchange(Step("w", history=[*rows, row(5, at=NOW)]))
    doubled = [row(2 * n, at=NOW + n * 60) for n in range(1, 8)]
    assert broker.history("task", MINUTE) == [row(5, at=NOW), *doubled]
    assert broker.history("task", MINUTE, NOW + 60, NOW + 360) == doubled[:5]


def test_nothing_is_left_of_old_rows(broker: RedisBroker) -> None:
    old = NOW - KEEP[MINUTE] - HOUR
    broker.keep_history([row(1, at=old - 60 * n) for n in range(300)])
    assert len(keys(broker)) == 302
    broker.tick()
    broker.tick()
    assert keys(broker) == set()
    broker.keep_history([row(1)])
    broker.keep_history([row()])
    assert keys(broker) == set()


def test_replacing_a_row_whose_reply_was_lost_is_done_once(
    broker: RedisBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = ServerConnection._send, list[bytes]()

    def send(line: ServerConnection, command: tuple[Any, ...]) -> Any:
        answer = real(line, command)
        if not lost and b"_history_change" in command[1]:
            lost.append(command[1])
            broker.exchange(Step("w", history=[row(7)]))  # it must not be replaced by a repetition
            line.close()
            raise ConnectionError("cut")
        return answer

    monkeypatch.setattr(ServerConnection, "_send", send)
    broker.keep_history([row(50)])
    assert lost
    assert broker.history("task", MINUTE) == [row(57)]
