"""History on Redis: sums that change meanwhile, and replies that are lost."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.history_rows import HOUR, MINUTE, HistoryRow
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.connections import ServerConnection
from tidemill.brokers.shared import folded_history
from tidemill.core.clock import clock

pytestmark = pytest.mark.usefixtures("worker")
NOW = int(clock.wall()) // HOUR * HOUR


def row(*counts: int, name: str = "a", at: int = NOW, sample: bytes = b"") -> HistoryRow:
    return HistoryRow("task", name, MINUTE, at, counts, sample)


def keys(broker: RedisBroker) -> set[bytes]:
    """The keys of history, without the store's hash tag."""
    found = broker._lines.ask(b"KEYS", broker._lines.key.replace(b"{", b"\\{") + b":*")
    names = (name.partition(b"}:")[2] for name in found)
    return {name for name in names if name.startswith((b"counts", b"sums", b"periods", b"kinds"))}


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
