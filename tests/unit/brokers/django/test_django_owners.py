"""Owners in ``django://`` that seem dead: to another machine, or for a moment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from broker_driver import LiveOwner, job, message
from moved_clock import MovedClock
from servers import django_on_sqlite

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.django.broker import DjangoBroker
from tidemill.brokers.registry import open_broker
from tidemill.brokers.shared.owners import Row
from tidemill.core.job import Owner, State

pytestmark = pytest.mark.everyday

LEASE, TTR = 30.0, 600.0


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[tuple[DjangoBroker, DjangoBroker]]:
    """Two processes on one store; the database has answered for long."""
    url = django_on_sqlite(str(tmp_path / "store"))
    one, other = open_broker(url), open_broker(url)
    with contextlib.closing(one), contextlib.closing(other):
        one._owners._store.database.since -= 3600
        yield one, other


def test_a_consumer_on_another_machine_is_not_dead_while_the_ttr_lasts(
    brokers: tuple[DjangoBroker, DjangoBroker], moved_clock: MovedClock
) -> None:  # case Q7
    here, away = brokers
    away.put([message(id="m", ttr=TTR)])
    consumer = LiveOwner(away, kind="consumer", host="elsewhere")
    assert len(consumer.take()) == 1
    Path(away._owners._liveness.path(away._owners[consumer.id].number)).unlink()  # not seen here
    # when it is silent for longer than its lease, it is alive
    moved_clock.advance(2 * LEASE)
    assert here._owners.reap() == 0
    assert [owner.id for owner in here.owners()] == [consumer.id]
    # until the ttr is over, too
    moved_clock.advance(TTR)
    assert here._owners.reap() == 1
    assert here.owners() == []


def test_an_owner_that_attaches_again_after_the_look_is_not_buried(
    brokers: tuple[DjangoBroker, DjangoBroker],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # law 5
    here, there = brokers
    here.put([job(id="a")])
    owner = Owner(id="o", name="o")
    there.attach(owner)
    there._owners.after_fork_child()  # its process dies
    is_dead = here._owners._is_dead

    def look(row: Row, rows: Sequence[Row]) -> bool:
        dead = is_dead(row, rows)
        there.attach(owner)
        assert len(there.exchange(Step("o", want=Want(1))).leases) == 1
        return dead

    monkeypatch.setattr(here._owners, "_is_dead", look)
    # when
    assert here._owners.reap() == 0
    # then
    assert not caplog.records
    record = here.get("a")
    assert record.state is State.RUNNING
