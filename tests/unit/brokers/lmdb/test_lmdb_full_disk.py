"""A disk that is full, and a map that another process has made larger."""

from __future__ import annotations

import contextlib
from pathlib import Path

import lmdb
import pytest
from disks import fill_disk, kept_full
from lmdb_desk import Process, job

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.lmdb.engine.environment import translated
from tidemill.brokers.lmdb.engine.transactions import Reading
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Owner, Verdict
from tidemill.errors import BrokerUnavailable, StoreFull, TidemillError


def test_running_jobs_are_settled_while_another_program_takes_every_byte(small_disk: Path) -> None:
    # law 16
    # given running jobs
    broker = open_broker(f"lmdb://{small_disk}/store")
    broker.attach(Owner(id="o", name="w"))
    broker.put([job() for _ in range(30)])
    leases = broker.exchange(Step("o", want=Want(30))).leases
    # and free pages of the data file that were never written
    with broker._store.env.begin(write=True) as txn:
        for n in range(20):
            txn.put(b"%d" % n, b"x" * 5000)
        for n in range(20):
            txn.delete(b"%d" % n)
    # when the disk is full
    with kept_full(small_disk):
        # then each job can be settled
        for lease in leases:
            assert broker.exchange(Step("o", verdicts=[Verdict(lease.token, 0)])).settled == [True]
    broker.close()


def test_a_write_that_is_cut_short_on_a_full_disk_is_no_broken_disk(small_disk: Path) -> None:
    short = lmdb.DiskError("mdb_txn_commit: Input/output error")
    assert isinstance(translated(short, str(small_disk)), BrokerUnavailable)
    fill_disk(small_disk)
    assert isinstance(translated(short, str(small_disk)), StoreFull)
    quota = lmdb.Error("mdb_txn_commit: Disk quota exceeded")
    assert isinstance(translated(quota, "/nowhere"), StoreFull)


@pytest.mark.parametrize("place", ["between two transactions", "before a step"])
def test_a_map_that_grows_at_any_moment_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    url = f"lmdb://{tmp_path}/store?durability=relaxed"
    broker = open_broker(f"{url}&map_size={1 << 21}")
    broker.put([job(id="first")])
    broker.attach(Owner(id="o", name="w"))
    [lease] = broker.exchange(Step("o", want=Want(1))).leases
    code = """
        say("open")
        sys.stdin.readline()
        for n in range(60):
            broker.put([Envelope(id=f"{n}", task="t", body=b"x" * 100_000)])
        say("done")
        sys.stdin.readline()
    """
    with Process(f"{url}&map_size={1 << 26}", code) as other:
        other.expect("open")

        def grow() -> None:
            monkeypatch.undo()
            other.tell("go")
            other.expect("done")

        # when the map grows while a list is read, or before a step
        if place == "before a step":
            grow()
            settled = broker.exchange(Step("o", [Verdict(lease.token, 0)])).settled
            assert settled == [True]
        else:
            enter = Reading.__enter__

            def enter_and_grow(reading: Reading) -> lmdb.Transaction[bytes]:
                txn = enter(reading)
                grow()
                return txn

            monkeypatch.setattr(Reading, "__enter__", enter_and_grow)
        # then nobody notices
        assert broker.find(Filter(), 100).records[-1].envelope.id == "first"
        assert len(broker.find(Filter(), 100).records) == 61
    broker.close()


def test_a_map_that_grows_while_another_thread_reads_the_store_is_no_crash(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store?durability=relaxed"
    # given a process with a thread that reads the store
    reader = """
        import threading
        broker.put([Envelope(id=f"old{n}", task="t", body=b"x" * 1000) for n in range(500)])
        store, goes_on, seen = broker._store, threading.Event(), []
        def read():
            with store.reading_views() as (txn, views):
                values = [value for _, value in views.cursor(store.tables.job)]
                say("reading")
                goes_on.wait()
                seen.extend(bytes(value) for value in values)
        threads = [threading.Thread(target=read)]
        threads[0].start()
        sys.stdin.readline()
        # when the map grows, and another thread needs the new map
        threads.append(threading.Thread(target=broker.get, args=("new",)))
        threads[1].start()
        threads[1].join(0.5)
        goes_on.set()
        for thread in threads:
            thread.join()
        say(len(seen))
    """
    with Process(f"{url}&map_size={1 << 21}", reader) as process:
        process.expect("reading")
        large = open_broker(f"{url}&map_size={1 << 26}")
        large.put([job(body=b"x" * 100_000) for _ in range(60)])
        large.close()
        process.tell("go")
        # then the thread that reads is not killed
        process.expect("500")


def test_a_purge_of_a_store_without_room_deletes_what_it_cannot_keep(small_disk: Path) -> None:
    # law 16
    with Tidemill(f"lmdb://{small_disk}/store") as mill:
        orders = mill.queue("q")
        with contextlib.suppress(StoreFull):
            while True:
                orders.put_many([b"x" * 500] * 100)
        jobs = orders.size()
        assert orders.purge() == jobs
        assert orders.size() == 0
        kept = sum(purge.jobs for purge in orders.purges())
        assert len(list(mill.jobs())) == kept < jobs
        # when there is room again, a purge keeps all
        mill.broker._store.room.look_again()  # type: ignore[attr-defined]
        orders.put_many([1, 2, 3])
        assert orders.purge() == 3
        assert orders.restore().jobs == 3


def test_a_broker_closes_when_its_owner_cannot_leave_a_full_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_broker(f"lmdb://{tmp_path}/store?durability=relaxed")
    broker.attach(Owner(id="o", name="w"))

    def refuse(*args: object, **options: object) -> None:
        raise StoreFull("the store has no room")

    monkeypatch.setattr(broker._owners, "_commit", refuse)
    broker.close()
    with pytest.raises(TidemillError, match="closed"):
        broker.owners()
