"""Topics: bindings are kept with a version, and copies are put only under that version."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from broker_driver import LiveOwner, message, state

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.store import Store
from tidemill.brokers.contract.topics import Binding, Topics, with_topics
from tidemill.brokers.registry import open_broker
from tidemill.core.backoff import ENDLESS
from tidemill.core.clock import new_id
from tidemill.core.errors import DuplicateJob, FeatureMissing, QueueFull, StoreMoved
from tidemill.core.job import Placed, State
from tidemill.transfer.store_to_store import move

OpenStore = Callable[..., Broker]


@pytest.fixture
def topics(need: Callable[[Feature], None], broker: Broker) -> Topics:
    need(Feature.TOPICS)
    return with_topics(broker, "bind")


def names(broker: Broker) -> list[str]:
    return sorted(row.name for row in broker.stats())


def test_a_new_store_has_no_bindings_and_the_empty_version(topics: Topics) -> None:
    assert topics.bindings().table == ()
    assert topics.bindings().version == ""
    assert topics.publish([], "") == []


def test_bindings_are_listed_in_order_and_each_once(broker: Broker, topics: Topics) -> None:
    assert topics.bind("q", "orders.*")
    assert topics.bind("mail", "#")
    assert topics.bind("mail", "a.ü ÄÖ.*")
    version = topics.bindings().version
    assert not topics.bind("q", "orders.*")

    assert topics.bindings().version == version
    assert topics.bindings().table == (
        *(Binding("mail", "#"), Binding("mail", "a.ü ÄÖ.*"), Binding("q", "orders.*")),
    )
    assert names(broker) == ["mail", "q"]


def test_a_binding_is_deleted_once(topics: Topics) -> None:
    topics.bind("q", "a")
    topics.bind("q", "b")
    version = topics.bindings().version

    assert topics.unbind("q", "a")
    assert not topics.unbind("q", "a")
    assert not topics.unbind("other", "b")

    assert topics.bindings().table == (Binding("q", "b"),)
    assert topics.bindings().version != version


def test_copies_are_put_under_the_version_of_the_bindings(
    broker: Broker, topics: Topics, consumer: LiveOwner
) -> None:
    topics.bind("a", "x")
    topics.bind("b", "x")
    copies = [message("a", body=b"1"), message("b", body=b"1")]

    puts = topics.publish(copies, topics.bindings().version)

    assert puts is not None
    assert [(put.id, put.placed) for put in puts] == [(c.id, Placed.CREATED) for c in copies]
    assert [state(broker, copy.id) for copy in copies] == [State.READY, State.READY]
    assert len(consumer.take(5, ["a", "b"])) == 2


@pytest.mark.parametrize("change", ["bind", "unbind", "forget_queue"])
def test_nothing_is_put_after_a_change_of_the_bindings(
    broker: Broker, topics: Topics, change: str
) -> None:
    topics.bind("a", "x")
    topics.bind("b", "x")
    version = topics.bindings().version
    if change == "bind":
        topics.bind("c", "y")
    elif change == "unbind":
        topics.unbind("b", "x")
    else:
        assert broker.forget_queue("b")

    copy = message("a")
    assert topics.publish([copy], version) is None
    assert topics.publish([], version) is None
    assert broker.get(copy.id) is None
    assert topics.publish([copy], topics.bindings().version) is not None
    assert state(broker, copy.id) is State.READY


def test_a_version_is_never_used_twice(topics: Topics) -> None:
    versions = set()
    for _ in range(3):
        topics.bind("q", "a")
        versions.add(topics.bindings().version)
        topics.unbind("q", "a")
        versions.add(topics.bindings().version)
    assert len(versions) == 6


def test_a_forgotten_queue_loses_its_bindings_and_no_others(broker: Broker, topics: Topics) -> None:
    topics.bind("q", "a")
    topics.bind("q", "b")
    topics.bind("other", "a")
    broker.put([message("q")])
    assert not broker.forget_queue("q")
    assert len(topics.bindings().table) == 3

    broker.purge("q")
    assert broker.forget_queue("q")

    assert topics.bindings().table == (Binding("other", "a"),)
    assert names(broker) == ["other"]


def test_a_full_queue_refuses_the_copies_of_all_queues(broker: Broker, topics: Topics) -> None:
    topics.bind("a", "x")
    topics.bind("b", "x")
    broker.set_queue("b", max_size=1)
    broker.put([message("b")])
    copy = message("a")

    with pytest.raises(QueueFull):
        topics.publish([copy, message("b")], topics.bindings().version)

    assert broker.get(copy.id) is None


def test_a_taken_id_refuses_all_copies(broker: Broker, topics: Topics) -> None:
    first, copy = message("b"), message("a")
    broker.put([first])
    with pytest.raises(DuplicateJob):
        topics.publish([copy, message("b", id=first.id)], "")
    assert broker.get(copy.id) is None


def test_a_repeated_publish_gets_the_first_answer_whatever_the_bindings_are_now(
    broker: Broker, topics: Topics
) -> None:
    topics.bind("a", "x")
    version, nonce, copy = topics.bindings().version, new_id(), message("a")
    first = topics.publish([copy], version, nonce=nonce)
    topics.bind("b", "x")

    assert topics.publish([copy], version, nonce=nonce) == first
    assert sum(row.accepted for row in broker.stats()) == 1


def test_a_publish_under_an_old_version_leaves_its_nonce_unused(
    broker: Broker, topics: Topics
) -> None:
    topics.bind("a", "x")
    nonce, copy = new_id(), message("a")
    assert topics.publish([copy], "", nonce=nonce) is None
    assert topics.publish([copy], topics.bindings().version, nonce=nonce) is not None
    assert state(broker, copy.id) is State.READY


def test_copies_keep_the_options_of_a_put(broker: Broker, topics: Topics) -> None:
    topics.bind("a", "x")
    copy = message("a", delay=50.0, expires=90.0, tags=("t",), retries=ENDLESS, rank=7)
    topics.publish([copy], topics.bindings().version)

    record = broker.get(copy.id)
    assert record is not None
    assert (record.state, record.rank, record.envelope.tags) == (State.SCHEDULED, 7, ("t",))


def test_a_store_that_departs_refuses_bindings_and_copies_and_shows_its_bindings(
    broker: Broker, topics: Topics, need: Callable[[Feature], None]
) -> None:
    need(Feature.MOVE)
    topics.bind("q", "a")
    before = topics.bindings()
    broker.depart("lmdb://./elsewhere")

    for call in (
        lambda: topics.bind("q", "b"),
        lambda: topics.unbind("q", "a"),
        lambda: topics.publish([message("q")], before.version),
        lambda: topics.publish([], ""),
    ):
        with pytest.raises(StoreMoved):
            call()
    assert topics.bindings() == before


def test_a_move_takes_the_bindings_along(
    broker: Broker, topics: Topics, need: Callable[[Feature], None], tmp_path: Path
) -> None:
    need(Feature.MOVE)
    topics.bind("q", "a.*")
    topics.bind("mail", "#")
    broker.put([message("q")])
    target: Any = open_broker(f"lmdb://{tmp_path}/target")
    move(cast(Store, broker), target)
    assert target.bindings().table == topics.bindings().table
    target.close()


def test_a_move_to_a_store_without_topics_is_refused_while_there_are_bindings(
    broker: Broker, topics: Topics, need: Callable[[Feature], None], tmp_path: Path
) -> None:
    need(Feature.MOVE)
    target: Any = open_broker(f"lmdb://{tmp_path}/target")
    target.features -= {Feature.TOPICS}
    topics.bind("q", "a.*")
    with pytest.raises(FeatureMissing, match="a binding needs the feature topics"):
        move(cast(Store, broker), target)
    assert topics.unbind("q", "a.*")  # the store does not depart
    target.close()


def test_bindings_are_seen_by_other_brokers_of_the_store(
    topics: Topics, need: Callable[[Feature], None], open_store: OpenStore
) -> None:
    need(Feature.PROCESSES)
    topics.bind("q", "a")
    other = with_topics(open_store(), "bindings")
    assert other.bindings() == topics.bindings()
    other.unbind("q", "a")
    assert topics.bindings().table == ()


def test_each_publish_reaches_all_queues_bound_before_it_while_bindings_change(
    broker: Broker, topics: Topics
) -> None:
    """One thread binds queues while the other publishes: each publish sees one whole table."""
    committed: list[int] = [0]

    def bind() -> None:
        for number in range(20):
            topics.bind(f"q{number:02}", "x")
            committed[0] = number + 1

    binder = threading.Thread(target=bind)
    binder.start()
    sizes = []
    while not sizes or sizes[-1] < 20:
        before = committed[0]
        bindings = topics.bindings()
        copies = [message(queue) for queue in bindings.queues_for("x")]
        if topics.publish(copies, bindings.version) is not None:
            assert len(copies) >= before
            sizes.append(len(copies))
        if not binder.is_alive() and committed[0] < 20:
            break
    binder.join(60)
    assert sizes == sorted(sizes)
    accepted = {row.name: row.accepted for row in broker.stats()}
    assert accepted == {
        f"q{number:02}": sum(size > number for size in sizes) for number in range(20)
    }
