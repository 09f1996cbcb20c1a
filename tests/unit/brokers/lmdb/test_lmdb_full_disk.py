"""A disk that is full, and a map that another process has made larger."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest
from disks import fill_disk
from lmdb_desk import Process, job

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.environment import translated
from tidemill.brokers.registry import open_broker
from tidemill.core.errors import BrokerUnavailable, StoreFull
from tidemill.core.job import Owner, Verdict


def put_for_ever(broker: LmdbBroker) -> None:
    while True:
        broker.put([job(body=b"x" * 500) for _ in range(100)])


def finish_all(broker: LmdbBroker) -> int:
    done = 0
    while leases := broker.exchange(Step("o", want=Want(50))).leases:
        verdicts = [Verdict(lease.token, 0) for lease in leases]
        done += sum(broker.exchange(Step("o", verdicts=verdicts)).settled)
    return done


def test_a_full_disk_takes_puts_again_once_jobs_are_finished(small_disk: Path) -> None:
    """The pages that finished jobs leave in the file are room, though the disk stays full."""
    # given a store that has filled its disk
    broker = open_broker(f"lmdb://{small_disk}/store?keep=0&keep_failed=0")
    assert isinstance(broker, LmdbBroker)
    broker.attach(Owner(id="o", name="w"))
    with pytest.raises(StoreFull, match="disk"):
        put_for_ever(broker)
    fill_disk(small_disk)
    broker._store.room.look_again()
    with pytest.raises(StoreFull):
        broker.put([job()])
    # when all jobs are finished, and nobody else makes room
    assert finish_all(broker) > 1000
    broker._store.room.look_again()
    # then puts are taken
    assert broker.put([job() for _ in range(20)])
    assert finish_all(broker) == 20
    broker.close()


def test_a_write_that_is_cut_short_on_a_full_disk_is_no_broken_disk(small_disk: Path) -> None:
    short = lmdb.DiskError("mdb_txn_commit: Input/output error")
    assert isinstance(translated(short, str(small_disk)), BrokerUnavailable)
    fill_disk(small_disk)
    assert isinstance(translated(short, str(small_disk)), StoreFull)
    quota = lmdb.Error("mdb_txn_commit: Disk quota exceeded")
    assert isinstance(translated(quota, "/nowhere"), StoreFull)


def test_a_map_that_another_process_made_larger_is_adopted(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store?durability=relaxed"
    # given a process with a small map
    broker = open_broker(f"{url}&map_size={1 << 21}")
    broker.put([job(id="first")])
    # when another with a larger one puts more than fits in the small one
    code = """
        for n in range(60):
            broker.put([Envelope(id=f"{n}", task="t", body=b"x" * 100_000)])
        say("done")
    """
    with Process(f"{url}&map_size={1 << 26}", code) as other:
        other.expect("done")
    # then the first goes on, reading and writing
    assert broker.get("first") is not None
    assert broker.stats()[0].ready == 61
    assert broker.put([job()])
    broker.close()
