"""Remote owners on an LMDB store that were given up, or that another server speaks for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from lmdb_desk import job

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.parked_waits import sleep
from tidemill.brokers.lmdb import wakeup
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.errors import TidemillError
from tidemill.core.owner import Command, Owner


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def slots(broker: LmdbBroker) -> int:
    """How many are taken."""
    marks = broker._store.wakeups._map
    return sum(marks[slot * wakeup._SIZE] for slot in range(1, wakeup._SLOTS + 1))


def in_wait(broker: LmdbBroker, name: str) -> bool:
    slot = broker._owners[name].sleeper.slot
    return bool(broker._store.wakeups._map[slot * wakeup._SIZE + wakeup._WAITS])


def test_an_owner_that_was_given_up_leaves_nothing_behind(broker: LmdbBroker) -> None:
    """Neither a place to sleep nor a descriptor, or a server would have none left one day."""
    before = slots(broker)
    names = ["a", "b", "c"]
    for name in names:
        broker.attach(Owner(id=name, name=name, lease=1.0))
        broker.exchange(Step(name, serial=1, want=Want(1)))
    returned = threading.Event()

    def sleep() -> None:
        while broker.owners():
            broker.wait("a", 60.0)
        returned.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    until(lambda: in_wait(broker, "a"))

    # when
    def forgotten() -> bool:
        broker.count_silence()
        return slots(broker) == before

    until(forgotten)
    # then
    assert returned.wait(30)
    thread.join(30)
    assert (broker.owners(), broker._owners.ids()) == ([], [])
    assert broker.exchange(Step("a", serial=2)).commands == [Command("lost")]
    with pytest.raises(TidemillError, match="not attached"):
        broker.wait("a", 0.0)
    # and begins anew
    broker.attach(Owner(id="a", name="a", lease=3600.0))
    broker.put([job(id="j")])
    [lease] = broker.exchange(Step("a", serial=3, want=Want(1))).leases
    assert lease.open().id == "j"
    broker.wait("a", 0.0)


def test_a_sleeping_owner_is_woken_before_it_is_forgotten(broker: LmdbBroker) -> None:
    broker.attach(Owner(id="a", name="a", lease=3600.0))
    broker.exchange(Step("a", serial=1, want=Want(1)))
    other = open_broker(broker.url)
    member = broker._owners["a"]
    with member.sleeper.asleep.inside():  # a thread that the bell has not woken yet
        other.release("a", None)
        other.close()
        member.sleeper.drain()
        broker.count_silence()
        assert broker._owners.find("a") is member
        assert member.sleeper.wait(60.0) == []  # woken
    broker.count_silence()
    assert broker._owners.find("a") is None
    assert sleep(broker._owners.parked(member, 60.0, [])) == []  # it looked it up before


def test_a_server_hears_that_its_own_desk_was_given_up(broker: LmdbBroker) -> None:
    broker.attach(Owner(id="desk", kind="consumer", name="desk", lease=3600.0))
    broker.exchange(Step("desk"))
    other = open_broker(broker.url)
    other.release("desk", None)
    other.close()
    broker.count_silence()
    assert broker.exchange(Step("desk")).commands == [Command("lost")]
