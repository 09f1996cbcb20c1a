"""Purging a queue through the API: what is kept, listed and restored, and when it is not."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from tidemill import Tidemill, TidemillError
from tidemill.brokers.generic import purges
from tidemill.brokers.generic.purges import Restored
from tidemill.errors import StoreFull


def bodies(mill: Tidemill, queue: str = "q") -> list[object]:
    found = []
    while message := mill.queue(queue).get(timeout=0):
        found.append(message.body)
        message.ack()
    return found


def test_the_jobs_of_the_latest_purge_come_back(mill: Tidemill) -> None:
    orders = mill.queue("q")
    orders.put("first")
    assert orders.purge() == 1
    orders.put_many([2, 3])
    before = time.time()
    assert orders.purge() == 2
    assert orders.size() == 0
    assert bodies(mill) == []

    latest, first = orders.purges()
    assert (latest.queue, latest.jobs, first.jobs) == ("q", 2, 1)
    assert before - 0.01 <= latest.at <= time.time()

    assert orders.restore() == Restored(jobs=2, left=0)
    assert orders.purges() == [first]
    assert bodies(mill) == [2, 3]
    assert orders.restore(first.id) == Restored(jobs=1, left=0)
    assert bodies(mill) == ["first"]
    assert orders.purges() == []


def test_a_purge_now_keeps_nothing(mill: Tidemill) -> None:
    orders = mill.queue("q")
    orders.put_many([1, 2])
    assert orders.purge(now=True) == 2
    assert orders.purges() == []
    assert list(mill.jobs()) == []
    with pytest.raises(TidemillError, match="no purge of queue 'q' can be restored"):
        orders.restore()


def test_purges_belong_to_their_queue(mill: Tidemill) -> None:
    mill.queue("q").put(1)
    mill.queue("other").put(2)
    mill.queue("q").purge()
    mill.queue("other").purge()
    [purge] = mill.queue("q").purges()
    with pytest.raises(TidemillError, match="queue 'other' keeps no jobs of a purge"):
        mill.queue("other").restore(purge.id)
    assert mill.queue("q").restore(purge.id).jobs == 1
    assert len(mill.queue("other").purges()) == 1


def test_what_could_not_be_restored_stays_listed(mill: Tidemill) -> None:
    orders = mill.queue("q")
    orders.put(1, key="k")
    orders.put(2)
    orders.purge()
    new = orders.put(3, key="k")
    assert orders.restore() == Restored(jobs=1, left=1)
    [purge] = orders.purges()
    assert purge.jobs == 1
    assert mill.job(new.id).cancel()
    assert orders.restore() == Restored(jobs=1, left=0)
    assert orders.purges() == []
    assert sorted(bodies(mill)) == [1, 2]  # type: ignore[type-var]


def test_more_jobs_than_a_page_come_back(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purges, "_PIECE", 7)
    orders = mill.queue("q")
    orders.put_many(range(50))
    for job in list(mill.jobs())[:10]:
        job.cancel()
    assert orders.purge() == 40
    assert orders.restore() == Restored(jobs=40, left=0)
    assert bodies(mill) == list(range(40))


def test_a_purge_that_was_interrupted_can_be_restored(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = mill.queue("q")
    orders.put_many([1, 2])
    real = mill.broker.cancel

    def interrupted(ids: list[str], **options: str) -> list[bool]:
        real(ids, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mill.broker, "cancel", interrupted)
        with pytest.raises(KeyboardInterrupt):
            orders.purge()
    [purge] = orders.purges()
    assert purge.jobs == 0
    assert orders.restore() == Restored(jobs=2, left=0)


def full(*_: object, **__: object) -> list[bool]:
    raise StoreFull("the disk is full")


@pytest.mark.parametrize("name", ["change_schedules", "cancel"])
def test_without_room_a_purge_deletes_for_good_and_says_so(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    mill.queue("q").put_many([1, 2, 3])
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tidemill"):
        patch.setattr(mill.broker, name, full)
        assert mill.queue("q").purge() == 3
    assert "3 jobs are deleted for good" in caplog.text
    assert mill.queue("q").purges() == []
    assert list(mill.jobs()) == []


def test_a_purge_now_leaves_a_job_that_starts_meanwhile(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, taken = mill.queue("q"), []
    orders.put_many([1, 2])
    real = mill.broker.find

    def and_take(*args: Any) -> Any:
        page = real(*args)
        taken.append(orders.get(timeout=0))
        return page

    with monkeypatch.context() as patch:
        patch.setattr(mill.broker, "find", and_take)
        assert orders.purge(now=True) == 1
    assert taken[0].body == 1
    taken[0].ack()
    assert list(mill.jobs()) == []
