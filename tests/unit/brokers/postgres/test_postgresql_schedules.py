"""Schedules on PostgreSQL: replies that are lost, and many that change the same ones at a time."""

from __future__ import annotations

import threading

import pytest
from moved_clock import MovedClock
from postgres_desk import ids, job, lose_replies

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.schedules import CLAIM, Change, Changed
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock

pytestmark = pytest.mark.usefixtures("worker")


def test_a_change_whose_reply_was_lost_is_made_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 4, case C7
    [made] = broker.change_schedules([Change("s", 0, clock.wall() - 1)])
    lost = lose_replies(monkeypatch, b".change_schedules(")
    due = clock.wall() + 60
    [changed] = broker.change_schedules([Change("s", made.version, due, jobs=(job(id="j"),))])
    assert lost
    [record] = broker.schedules(["s"])
    assert (changed.done, changed.version, changed.left_out) == (True, record.version, ())
    assert ids(broker) == {"j"}
    assert broker.stats()[0].accepted == 1


def test_a_schedule_handed_out_with_a_lost_reply_is_handed_out_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, moved_clock: MovedClock
) -> None:
    # case C7
    broker.change_schedules([Change("s", 0, clock.wall() - 1)])
    lost = lose_replies(monkeypatch, b".hand_out(")
    reply = broker.exchange(Step("w", fires=5))
    assert lost
    assert reply.schedules == []
    assert 0 < reply.next_due <= CLAIM
    moved_clock.advance(CLAIM + 0.1)
    assert [s.name for s in broker.exchange(Step("w", fires=5)).schedules] == ["s"]


def test_many_that_change_the_same_ones_in_other_orders(broker: Broker, url: str) -> None:
    # case C7: each version is changed once, and nobody waits for ever
    names = [f"s{n}" for n in range(20)]
    broker.change_schedules([Change(name, 0, 1.0) for name in names])
    made: list[Changed] = []
    jobs: list[str] = []

    def run(order: int) -> None:
        other = open_broker(url.partition("&migrate")[0])
        for _ in range(15):
            records = [record for record in other.schedules(names[::order]) if record]
            put = [job() for _ in records]
            changes = [
                Change(r.name, r.version, r.due + 1, jobs=(j,))
                for r, j in zip(records, put, strict=True)
            ]
            for changed, one in zip(other.change_schedules(changes), put, strict=True):
                if changed.done:
                    made.append(changed)
                    jobs.append(one.id)
        other.close()

    threads = [threading.Thread(target=run, args=(order,)) for order in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert ids(broker) == set(jobs)
    assert len({changed.version for changed in made}) == len(made)
    records = [record for record in broker.schedules(names) if record]
    assert sum(record.due - 1 for record in records) == len(made)
