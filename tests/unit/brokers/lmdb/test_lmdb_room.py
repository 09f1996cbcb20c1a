"""Room in the LMDB store: a reserve that keeps work going, a file that stays flat."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from disks import fill_disk
from lmdb_desk import job

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Outcome, Owner, Verdict
from tidemill.errors import BrokerUnavailable, StoreFull

pytestmark = pytest.mark.everyday


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


def finish_all(broker: Broker) -> int:
    done = 0
    while leases := broker.exchange(Step("o", want=Want(50))).leases:
        verdicts = [Verdict(lease.token, 0) for lease in leases]
        done += sum(broker.exchange(Step("o", verdicts=verdicts)).settled)
    return done


def test_a_full_disk_refuses_puts_and_lets_work_finish(small_disk: Path) -> None:
    # case Q10, law 16
    broker = open_broker(f"lmdb://{small_disk}/store?keep=0&keep_failed=0")
    broker.attach(Owner(id="o", name="w"))
    accepted = 0

    def fill() -> None:
        nonlocal accepted
        while True:
            broker.put([job(body=b"x" * 500) for _ in range(100)])
            accepted += 100

    with pytest.raises(StoreFull, match="disk"):
        fill()
    assert broker.stats()[0].ready == accepted > 1000
    # somebody else fills the rest
    other = fill_disk(small_disk)
    with pytest.raises(StoreFull):
        broker.put([job()])
    assert finish_all(broker) == accepted
    # then the pages that finished jobs leave in the file are room, though the disk stays full
    broker._store.room.look_again()
    assert broker.put([job() for _ in range(20)])
    assert finish_all(broker) == 20
    # and so is other room
    other.unlink()
    broker.tick()
    broker._store.room.look_again()
    assert broker.put([job()])
    broker.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_store_that_was_deleted_confirms_nothing(tmp_path: Path, replaced: bool) -> None:
    """Nor one in whose place there is another: what is put there would be gone with this process.

    law 1
    """
    folder = tmp_path / "store"
    broker = open_broker(f"lmdb://{folder}")
    assert broker.put([job()])
    # when it is deleted, and perhaps made anew by somebody else
    folder.rename(tmp_path / "away")
    if replaced:
        shutil.copytree(tmp_path / "away", folder)
    # then each put is refused, that of a whole batch and the one alone that is tried after it
    for count in (1, 2, 1):
        with pytest.raises(BrokerUnavailable, match="was deleted or replaced while it was open"):
            broker.put([job() for _ in range(count)])
    with pytest.raises(BrokerUnavailable, match="was deleted or replaced"):
        broker.info()
    # and taken again when it is back
    if replaced:
        shutil.rmtree(folder)
    (tmp_path / "away").rename(folder)
    assert broker.put([job()])
    assert broker.info()["jobs"] == 2
    broker.close()
