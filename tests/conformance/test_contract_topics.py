"""Topics on the named records of a store: bindings are kept, listed, deleted and moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
from broker_driver import message

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.schedules import LAST_OWN
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.topics import Binding, bind, bindings, unbind, unbind_all
from tidemill.brokers.registry import open_broker
from tidemill.errors import StoreMoved
from tidemill.transfer.store_to_store import move

OpenStore = Callable[..., Broker]


@pytest.fixture
def store(need: Callable[[Feature], None], broker: Broker) -> Store:
    need(Feature.TOPICS)
    return cast(Store, broker)


def names(store: Store) -> list[str]:
    return sorted(row.name for row in store.stats())


def test_a_new_store_has_no_bindings(store: Store) -> None:
    assert bindings(store).table == ()
    assert bindings(store).queues_for("orders.new") == []


def test_bindings_are_listed_in_order_and_each_once(store: Store) -> None:
    assert bind(store, "q", "orders.*")
    assert bind(store, "mail", "#")
    assert bind(store, "mail", "a.ü ÄÖ.*")
    before = bindings(store)
    assert not bind(store, "q", "orders.*")

    assert bindings(store) == before
    assert before.table == (
        *(Binding("mail", "#"), Binding("mail", "a.ü ÄÖ.*"), Binding("q", "orders.*")),
    )
    assert before.queues_for("orders.new") == ["mail", "q"]
    assert names(store) == ["mail", "q"]


def test_a_binding_is_deleted_once(store: Store) -> None:
    bind(store, "q", "a")
    bind(store, "q", "b")

    assert unbind(store, "q", "a")
    assert not unbind(store, "q", "a")
    assert not unbind(store, "other", "b")
    assert bindings(store).table == (Binding("q", "b"),)
    assert unbind(store, "q", "b")
    assert bindings(store).table == ()


def test_a_queue_loses_all_its_bindings_and_no_others(store: Store) -> None:
    bind(store, "q", "a")
    bind(store, "q", "b")
    bind(store, "other", "a")

    assert unbind_all(store, "q")
    assert not unbind_all(store, "q")
    assert bindings(store).table == (Binding("other", "a"),)


def test_bindings_are_no_schedules(store: Store) -> None:
    bind(store, "q", "a")
    assert store.list_schedules(LAST_OWN, 10) == []


def test_a_store_that_departs_keeps_its_bindings(
    store: Store, need: Callable[[Feature], None]
) -> None:
    need(Feature.MOVE)
    bind(store, "q", "a")
    before = bindings(store)
    store.depart("lmdb://./elsewhere")

    for call in (lambda: bind(store, "q", "b"), lambda: unbind(store, "q", "a")):
        with pytest.raises(StoreMoved):
            call()
    assert bindings(store) == before


def test_a_move_takes_the_bindings_along(
    store: Store, need: Callable[[Feature], None], tmp_path: Path
) -> None:
    need(Feature.MOVE)
    bind(store, "q", "a.*")
    bind(store, "mail", "#")
    store.put([message("q")])
    target: Any = open_broker(f"lmdb://{tmp_path}/target")
    bind(target, "q", "b")
    moved = move(store, target)
    assert bindings(target).table == tuple(sorted([*bindings(store).table, Binding("q", "b")]))
    assert (moved.schedules, moved.stayed_schedules) == (0, [])
    target.close()


def test_bindings_are_seen_by_other_brokers_of_the_store(
    store: Store, need: Callable[[Feature], None], open_store: OpenStore
) -> None:
    need(Feature.PROCESSES)
    bind(store, "q", "a")
    other = cast(Store, open_store())
    assert bindings(other) == bindings(store)
    unbind(other, "q", "a")
    assert bindings(store).table == ()


def test_no_binding_is_lost_when_several_threads_bind_at_once(store: Store) -> None:
    def bind_some(first: int) -> None:
        for number in range(first, first + 10):
            bind(store, f"q{number:02}", "x")

    threads = [Thread(target=bind_some, args=(first,)) for first in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert bindings(store).queues_for("x") == [f"q{number:02}" for number in range(20)]
