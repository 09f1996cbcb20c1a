"""Puts inside a transaction of the caller's own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from lmdb_desk import ids, in_threads, job, join

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.core.job import Owner
from tidemill.errors import DuplicateJob, InvalidOption, TidemillError


@pytest.fixture
def env(tmp_path: Path) -> Iterator[lmdb.Environment]:
    with lmdb.open(str(tmp_path / "mine"), map_size=1 << 26, max_dbs=20, lib_version=0) as env:
        yield env


@pytest.fixture
def guest(env: lmdb.Environment) -> Iterator[LmdbBroker]:
    """A broker inside the caller's environment."""
    broker = LmdbBroker.around(env, "tm-")
    yield broker
    broker.close()


def test_a_put_in_a_transaction_appears_with_its_commit(
    env: lmdb.Environment, guest: LmdbBroker
) -> None:
    # case Q4, law 17
    mine = env.open_db(b"mine")
    guest.attach(Owner(id="o", name="w"))
    with env.begin(write=True) as txn:
        txn.put(b"order", b"17", db=mine)
        guest.put([job(id="one", queue="q")], txn=txn)
        guest.put([job(id="two", queue="queue2"), job(id="three", queue="q", delay=60)], txn=txn)
        assert ids(guest) == set()
    assert ids(guest) == {"one", "two", "three"}
    assert {(r.name, r.size) for r in guest.stats()} == {("q", 2), ("queue2", 1)}
    assert len(guest.exchange(Step("o", want=Want(9))).leases) == 2


def test_a_put_in_a_failed_transaction_leaves_no_job(
    env: lmdb.Environment, guest: LmdbBroker
) -> None:
    # case Q4, law 17

    def fail() -> None:
        with env.begin(write=True) as txn:
            guest.put([job(queue="q"), job(queue="queue2")], txn=txn)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ids(guest) == set()
    assert guest.stats() == []
    assert guest.put([job()])


def test_a_put_that_fails_inside_a_transaction_leaves_no_part_of_itself(
    env: lmdb.Environment, guest: LmdbBroker
) -> None:
    # law 3: there is no replay in the caller's transaction
    guest.put([job(id="taken")])
    with env.begin(write=True) as txn:
        guest.put([job(id="before")], txn=txn)
        with pytest.raises(DuplicateJob):
            guest.put([job(id="part", queue="new", key="k"), job(id="taken")], txn=txn)
        guest.put([job(id="after", key="k")], txn=txn)
    assert ids(guest) == {"taken", "before", "after"}
    assert [(r.name, r.ready) for r in guest.stats()] == [("default", 3)]


def test_a_sleeper_is_woken_by_the_transaction_and_acts_after_it(
    env: lmdb.Environment, guest: LmdbBroker
) -> None:
    # case Q4, law 17
    guest.attach(Owner(id="o", name="w"))
    guest.exchange(Step("o", want=Want(1)))
    guest.wait("o", 0)
    taken: list[str] = []
    asleep = threading.Event()

    def sleep() -> None:
        asleep.set()
        guest.wait("o", 20)
        leases = guest.exchange(Step("o", want=Want(1))).leases
        taken.extend(lease.open().id for lease in leases)

    with env.begin(write=True) as txn:
        thread = threading.Thread(target=sleep)
        thread.start()
        asleep.wait(10)
        guest.put([job(id="one")], txn=txn)
        assert taken == []
    thread.join(10)
    assert taken == ["one"]


def test_a_put_without_txn_inside_a_transaction_is_told_so(
    env: lmdb.Environment, guest: LmdbBroker
) -> None:
    with env.begin(write=True) as txn:
        with pytest.raises(TidemillError, match=r"txn="):
            guest.put([job()])
        guest.put([job(id="right")], txn=txn)
    assert ids(guest) == {"right"}


def test_waiting_for_a_leader_that_waits_for_us_ends(
    env: lmdb.Environment, guest: LmdbBroker
) -> None:
    with env.begin(write=True) as txn:
        threads, answers = in_threads([lambda: guest.put([job(id="other")])])
        while not guest._store.commits.lead.locked():
            os.sched_yield()
        guest._store.commits.patience = 0.2
        with pytest.raises(TidemillError, match=r"txn="):
            guest.put([job(id="mine")])
        guest.put([job(id="right")], txn=txn)
    join(threads)
    assert isinstance(answers[0], list)
    assert ids(guest) == {"other", "right"}


def test_a_transaction_that_is_none_of_ours_is_refused(
    env: lmdb.Environment, guest: LmdbBroker, broker: LmdbBroker
) -> None:
    with env.begin(write=True) as txn, pytest.raises(InvalidOption, match=r"txn"):
        broker.put([job()], txn=txn)
    with env.begin() as txn, pytest.raises(InvalidOption, match=r"txn"):
        guest.put([job()], txn=txn)
    for wrong in (object(), 17, "txn", env):
        with pytest.raises(InvalidOption, match=r"txn"):
            guest.put([job()], txn=wrong)
    with env.begin(write=True) as txn:
        pass
    with pytest.raises(InvalidOption, match=r"txn"):
        guest.put([job()], txn=txn)


def test_an_environment_without_room_for_tables_is_refused(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=3, lib_version=0) as env:
        with pytest.raises(InvalidOption, match=r"max_dbs"):
            LmdbBroker.around(env, "tm-")
        with env.begin(write=True) as txn:  # it is still the caller's to use
            txn.put(b"a", b"b")
