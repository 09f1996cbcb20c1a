"""The time that ``django://`` reads on SQLite, which has no clock of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from moved_clock import MovedClock
from servers import django_on_sqlite

from tidemill.brokers.django.broker import DjangoBroker
from tidemill.brokers.registry import open_broker

pytestmark = pytest.mark.everyday


def test_a_clock_that_a_test_stops_gives_the_same_time_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = MovedClock(monkeypatch, speed=0.0)
    broker = open_broker(django_on_sqlite(str(tmp_path / "store")))
    assert isinstance(broker, DjangoBroker)
    first, *others = [broker._store.read(lambda rows: rows.now()) for _ in range(50)]
    assert set(others) == {first}
    clock.advance(10)
    assert broker._store.read(lambda rows: rows.now()) == pytest.approx(first + 10, abs=1e-6)
    broker.close()
