"""The LMDB store: group commit, the caller's own transactions, space."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tidemill.brokers.base import Broker, Filter, Step, Want, open_broker
from tidemill.brokers.lmdb import puts
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.store import Store
from tidemill.clock import new_id
from tidemill.errors import (
    BrokerUnavailable,
    DuplicateJob,
    InvalidOption,
    StoreFull,
    TidemillError,
)
from tidemill.job import Envelope, Outcome, Owner, Verdict


def job(**fields: Any) -> Envelope:
    return Envelope(**{"id": new_id(), "task": "t", **fields})


def ids(broker: Broker) -> set[str]:
    return {r.envelope.id for r in broker.find(Filter(), 10_000).records}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LmdbBroker]:
    broker = open_broker(f"lmdb://{tmp_path}/store")
    assert isinstance(broker, LmdbBroker)
    yield broker
    broker.close()
    shutil.rmtree(tmp_path, ignore_errors=True)


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


class Gate:
    """Keeps the leader inside its transaction until the others have queued up behind it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.inside = threading.Event()
        self.open = threading.Event()
        self.thread = threading.Thread(target=lambda: store.commits.run(_Nothing, self.hold))
        self.thread.start()
        assert self.inside.wait(10)

    def hold(self, _: object) -> None:
        self.inside.set()
        assert self.open.wait(30)

    def release_when(self, pending: int) -> None:
        """Open once so many requests wait."""
        while len(self.store.commits.pending) < pending:
            os.sched_yield()
        self.open.set()
        self.thread.join(30)


class _Nothing:
    def __init__(self, *_: object) -> None: ...

    def finish(self) -> None: ...


def in_threads(calls: list[Any]) -> tuple[list[threading.Thread], list[Any]]:
    answers: list[Any] = [None] * len(calls)

    def run(n: int) -> None:
        try:
            answers[n] = calls[n]()
        except Exception as error:
            answers[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    return threads, answers


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_callers_that_meet_share_a_commit(broker: LmdbBroker) -> None:
    # law 1
    store = broker._store
    gate = Gate(store)
    before = store.env.info()["last_txnid"]
    threads, answers = in_threads([lambda: broker.put([job()])] * 20)
    gate.release_when(20)
    join(threads)
    # then: the gate's own commit, one for the twenty
    assert store.env.info()["last_txnid"] - before <= 2
    assert all(isinstance(a, list) for a in answers)
    assert len(ids(broker)) == 20


def test_a_failing_request_hurts_only_itself(broker: LmdbBroker) -> None:
    broker.put([job(id="taken")])
    gate = Gate(broker._store)
    calls = [lambda n=n: broker.put([job(id=f"new{n}")]) for n in range(6)]
    calls.insert(3, lambda: broker.put([job(id="half"), job(id="taken")]))
    calls.insert(5, lambda: broker.attach(Owner(id="o", name="w")))
    threads, answers = in_threads(calls)
    gate.release_when(8)
    join(threads)
    assert [type(a) for a in answers if isinstance(a, Exception)] == [DuplicateJob]
    assert ids(broker) == {"taken", *(f"new{n}" for n in range(6))}
    assert broker.stats()[0].ready == 7


def test_attaching_and_detaching_survive_a_replay(broker: LmdbBroker) -> None:
    # an owner's lock and place to sleep are no part of the transaction that is abandoned
    broker.put([job(id="taken")])
    for n in range(3):
        broker.attach(Owner(id=f"o{n}", name=f"w{n}"))
    gate = Gate(broker._store)
    threads, answers = in_threads(
        [
            lambda: broker.detach("o0"),
            lambda: broker.put([job(id="taken")]),
            lambda: broker.detach("o1"),
            lambda: broker.attach(Owner(id="o3", name="w3")),
        ]
    )
    gate.release_when(4)
    join(threads)
    assert [type(a) for a in answers] == [type(None), DuplicateJob, type(None), type(None)]
    assert sorted(o.id for o in broker.owners()) == ["o2", "o3"]
    assert len({m.sleeper.slot for o in ("o2", "o3") for m in [broker._members[o]]}) == 2


def test_when_the_store_is_full_each_is_replayed_by_itself(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case Q10
    insert = puts._insert

    def full(moves: Moves, envelope: Envelope, *args: Any, **kwargs: Any) -> None:
        insert(moves, envelope, *args, **kwargs)
        if envelope.body == b"big":
            raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL: Environment mapsize limit reached")

    gate = Gate(broker._store)
    monkeypatch.setattr(puts, "_insert", full)
    calls = [lambda: broker.put([job(), job()]), lambda: broker.put([job(body=b"big")])] * 2
    threads, answers = in_threads(calls)
    gate.release_when(4)
    join(threads)
    assert [type(a) for a in answers] == [list, StoreFull, list, StoreFull]
    assert len(ids(broker)) == 4


def test_a_follower_that_is_interrupted_takes_its_request_back(broker: LmdbBroker) -> None:
    store = broker._store
    gate = Gate(store)

    class Interrupted(BaseException):
        pass

    class Turn:
        def acquire(self, **_: object) -> bool:
            raise Interrupted

    from tidemill.brokers.lmdb import commit as module

    real = module.Request

    def interrupted_request(apply: Any) -> Any:
        request = real(apply)
        request.turn = Turn()
        return request

    module.Request = interrupted_request
    try:
        with pytest.raises(Interrupted):
            broker.put([job(id="gone")])
    finally:
        module.Request = real
    threads, _ = in_threads([lambda: broker.put([job(id="kept")])])
    gate.release_when(1)
    join(threads)
    assert ids(broker) == {"kept"}


def test_an_interrupted_leader_leaves_the_others_their_requests(broker: LmdbBroker) -> None:
    gate = Gate(broker._store)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    def lead() -> None:
        with pytest.raises(KeyboardInterrupt):
            broker._store.commits.run(broker._moves, interrupt)

    first, _ = in_threads([lead])
    while len(broker._store.commits.pending) < 1:
        os.sched_yield()
    threads, answers = in_threads([lambda: broker.put([job()])] * 5)
    gate.release_when(6)
    join(first + threads)
    assert [type(a) for a in answers] == [list] * 5
    assert len(ids(broker)) == 5
    assert broker.put([job()])  # the lead is free


def test_many_threads_lose_nothing(broker: LmdbBroker) -> None:
    # case Q8, small
    def storm(n: int) -> int:
        owner = f"o{n}"
        broker.attach(Owner(id=owner, name=owner))
        done = 0
        for _ in range(30):
            broker.put([job()])
            for lease in broker.exchange(Step(owner, want=Want(2))).leases:
                done += broker.exchange(Step(owner, verdicts=[Verdict(lease.token, 0)])).settled[0]
        return done

    interval = sys.getswitchinterval()
    threads, answers = in_threads([lambda n=n: storm(n) for n in range(8)])
    join(threads)
    [row] = broker.stats()
    assert (row.accepted, row.succeeded, row.ready, row.running) == (
        240,
        sum(answers),
        240 - sum(answers),
        0,
    )
    assert sys.getswitchinterval() == interval


def test_a_step_inside_a_step_is_an_error_not_a_deadlock(broker: LmdbBroker) -> None:
    with pytest.raises(TidemillError, match=r"wait for itself"):
        broker._store.commits.run(broker._moves, lambda moves: broker.put([job()]))


# -- the caller's own transaction ----------------------------------------------------------------


def test_what_is_put_in_a_transaction_appears_with_its_commit(
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


def test_what_is_put_in_a_transaction_that_fails_was_never_there(
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
    env: lmdb.Environment, guest: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.brokers.lmdb.commit.PATIENCE", 0.2)
    with env.begin(write=True) as txn:
        threads, answers = in_threads([lambda: guest.put([job(id="other")])])
        while not guest._store.commits.lead.locked():
            os.sched_yield()
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


# -- space ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1 << 20, 1 << 22])
@pytest.mark.parametrize("batch", [1, 50])
def test_puts_are_refused_while_there_is_room_to_finish(
    tmp_path: Path, size: int, batch: int
) -> None:
    # case Q10, law 16
    broker = open_broker(f"lmdb://{tmp_path}/store?map_size={size}&keep=0&durability=relaxed")
    broker.attach(Owner(id="o", name="w"))
    number = itertools.count()
    accepted: set[str] = set()

    def fill() -> None:
        while True:
            jobs = [job(id=f"{next(number):08}", body=b"x" * 300) for _ in range(batch)]
            broker.put(jobs)
            accepted.update(j.id for j in jobs)

    for _ in range(2):
        # when it is filled
        with pytest.raises(StoreFull, match=r"map|full"):
            fill()
        # then nothing is there in part
        unfinished = {r.envelope.id for r in broker.find(Filter(), 10**6).records}
        assert unfinished == accepted
        assert len(accepted) > 100
        # and reserving, settling, noting, retrying, draining still work
        broker.cancel([next(iter(accepted))])
        while leases := broker.exchange(Step("o", want=Want(40))).leases:
            verdicts = [
                Verdict(
                    lease.token,
                    Outcome.RETRY if lease.attempt == 1 else Outcome.SUCCESS,
                    error="e" * 50,
                )
                for lease in leases
            ]
            assert all(broker.exchange(Step("o", verdicts=verdicts)).settled)
        broker.delete(accepted)
        accepted.clear()
        broker._store.room.look_again()
    # and putting works again
    assert broker.put([job()])
    broker.close()


def test_the_file_stays_flat_over_many_cycles(tmp_path: Path) -> None:
    # case Q11, small
    broker = open_broker(f"lmdb://{tmp_path}/store?durability=relaxed&keep_count=100")
    broker.attach(Owner(id="o", name="w"))
    sizes = []
    for _ in range(3):
        verdicts: list[Verdict] = []
        for _ in range(100):
            broker.put([job(body=b"x" * 50) for _ in range(100)])
            step = Step("o", verdicts=verdicts, want=Want(100))
            verdicts = [Verdict(lease.token, 0) for lease in broker.exchange(step).leases]
        broker.exchange(Step("o", verdicts=verdicts))
        sizes.append(broker.info()["file_bytes"])
    assert sizes[2] <= 1.5 * sizes[0]
    broker.tick()
    assert broker.info()["jobs"] == 100
    broker.close()


# -- opening -------------------------------------------------------------------------------------


def test_another_format_is_refused(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    broker = open_broker(url)
    broker.put([job()])
    broker.close()
    with (
        lmdb.open(f"{tmp_path}/store", max_dbs=20, lib_version=0) as env,
        env.begin(write=True) as txn,
    ):
        txn.put(b"tidemill-=format", (99).to_bytes(8, "big"))
    with pytest.raises(BrokerUnavailable, match=r"format 99.*format 1"):
        open_broker(url)
    with pytest.raises(BrokerUnavailable):  # and says so again: nothing was left open
        open_broker(url)


@pytest.mark.parametrize(
    ("mount", "refused"),
    [("", True), ("/store", True), ("/store/deep", False), ("/sto", False), ("/other", False)],
)
def test_network_file_systems_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount: str, refused: bool
) -> None:
    base = tmp_path / "a b"
    mounts = tmp_path / "mounts"
    escaped = str(base).replace(" ", "\\040") + mount
    mounts.write_text(f"overlay / overlay rw 0 0\nserver:/x {escaped} nfs4 rw 0 0\n")
    monkeypatch.setattr("tidemill.brokers.lmdb.environment._MOUNTS", str(mounts))
    url = f"lmdb://{base}/store"
    if refused:
        with pytest.raises(BrokerUnavailable, match=r"network file system"):
            open_broker(url)
    else:
        open_broker(url).close()


def test_the_same_directory_opened_twice_is_shared(tmp_path: Path) -> None:
    # case Q12
    one = open_broker(f"lmdb://{tmp_path}/store")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    two = open_broker(f"lmdb://{tmp_path}/link")
    one.put([job(id="a")])
    assert two.get("a") is not None
    with pytest.raises(InvalidOption, match=r"durability"):
        open_broker(f"lmdb://{tmp_path}/store?durability=relaxed")
    one.close()
    two.put([job(id="b")])
    with pytest.raises(TidemillError, match=r"closed"):
        one.put([job()])
    two.close()
    again = open_broker(f"lmdb://{tmp_path}/store")
    assert ids(again) == {"a", "b"}
    again.close()


@pytest.mark.parametrize(
    "url", ["lmdb://", "lmdb:///x?durability=no", "lmdb:///x?map_size=5", "lmdb:///x?mapsize=5"]
)
def test_wrong_urls_are_refused_with_a_sentence(url: str) -> None:
    # case Q17
    with pytest.raises(InvalidOption):
        open_broker(url)


def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidOption, match=r"file"):
        open_broker(f"lmdb://{tmp_path}/file/store")
