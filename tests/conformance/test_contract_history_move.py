"""A move carries all rows of history, each once, and adds them to rows of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from broker_driver import LiveOwner
from kinds import KINDS, Clock, Kind

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HOUR, MINUTE, HistoryRow, join_name
from tidemill.brokers.contract.store import Store
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock
from tidemill.transfer import history as copying
from tidemill.transfer.store_to_store import move

NOW = int(clock.wall()) // HOUR * HOUR
STORES = [kind for kind in KINDS if kind.name not in ("memory", "rabbitmq")]


@pytest.fixture
def source(need: Callable[[Feature], None], broker: Store) -> Store:
    need(Feature.MOVE)
    return broker


@pytest.fixture(params=STORES, ids=lambda kind: f"to-{kind.name}")
def target(
    request: pytest.FixtureRequest, tmp_path: Path, source: Store, clock: Clock
) -> Iterator[Store]:
    kind: Kind = request.param
    opened = open_broker(kind.store_url(tmp_path / "target"))
    yield opened
    opened.close()


def row(name: str, *counts: int, kind: str = "task", span: int = MINUTE, **more: int) -> HistoryRow:
    return HistoryRow(kind, name, span, more.get("at", NOW), counts)


def rows(store: Store) -> list[HistoryRow]:
    """All rows but the place that the move has reached."""
    history = with_history(store, "history")
    kinds = [of for of in history.history_kinds() if of[0] != "move"]
    return [row for kind, span in kinds for row in history.history(kind, span)]


def fill(source: Store) -> None:
    name = join_name("q ü", "app.work", "1")
    worker = LiveOwner(source)
    times = [NOW - 3600, NOW - 60, NOW]
    worker.exchange(history=[row(name, 1, n, at=at) for n, at in enumerate(times)])
    worker.exchange(history=[row(name, 5, span=HOUR), row("f", 1, kind="failure")])
    note = HistoryRow("mute", "m", ALWAYS, 7, (), b"note\0")
    with_history(source, "history").keep_history([row("q", 8, 9, kind="queue"), note])
    source.detach(worker.id)


def test_all_rows_move_and_a_move_again_doubles_nothing(
    source: Store, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "PAGE", 2)
    fill(source)
    before = rows(source)
    move(source, target)
    assert rows(target) == before
    assert rows(source) == before
    move(source, target)
    assert rows(target) == before
    assert not [owner for owner in target.owners() if owner.name == "move"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.name == "lmdb"], ids=["lmdb"])
def test_rows_of_the_target_stay_and_added_rows_are_summed(
    source: Store, tmp_path: Path, kind: Kind
) -> None:
    fill(source)
    target = open_broker(f"lmdb://{tmp_path}/target")
    name = join_name("q ü", "app.work", "1")
    LiveOwner(target).exchange(history=[row(name, 100), row("own", 3)])
    with_history(target, "history").keep_history([row("q", 1, kind="queue")])
    move(source, target)
    history = with_history(target, "history")
    assert history.history("task", MINUTE, NOW) == [row("own", 3), row(name, 101, 2)]
    assert history.history("queue", MINUTE) == [row("q", 1, kind="queue")]
    target.close()
