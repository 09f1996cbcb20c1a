"""Real workers on an LMDB store whose disk is full: of bytes, or of inodes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import fill_disk, kept_full, mounted, take_inodes
from harness import Place, check_counters, eventually, open_place, runs_of

from tidemill.core.job import State
from tidemill.errors import ResultNotKept, StoreFull

APP = """
def wait_for(name):
    while not os.path.exists(os.path.join(HERE, name)):
        time.sleep(0.01)

@mill.task(retries=3)
def give(size, gate):
    begin()
    wait_for(gate)
    end()
    return b"x" * size

@mill.task
def silent(n):
    begin()
    end()
"""
SMALL, LARGE = 10, 200_000


@pytest.fixture
def place_on(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Opens a place whose store lies on a disk of its own; the disk is at ``disk`` beside it."""
    with contextlib.ExitStack() as stack:

        def open_one(options: str = "size=8m", query: str = "") -> Place:
            disk = stack.enter_context(mounted(tmp_path / "disk", options))
            (tmp_path / "p").mkdir()
            url = f"lmdb://{disk}/store{query}"
            place = stack.enter_context(open_place(tmp_path / "p", url))
            place.write(APP)
            return place

        yield open_one


def disk_of(place: Place) -> Path:
    return place.path.parent / "disk"


def put_until_full(place: Place, queue: str) -> int:
    count = 0
    with contextlib.suppress(StoreFull):
        while True:
            calls = [(n,) for n in range(20)]
            place.enqueue_many("silent", calls, queue=queue, headers={"h": "x" * 1000})
            count += 20
    return count


def states(place: Place) -> set[State]:
    return {record.state for record in place.records()}


@pytest.mark.everyday
def test_a_running_worker_settles_from_the_reserve_while_its_disk_is_full(
    place_on: Callable[..., Place],
) -> None:
    # laws 1, 3, 16, case Q10
    place = place_on()
    worker = place.worker(slots=20).wait_ready()
    small = place.enqueue_many("give", [(SMALL, "go")] * 30)
    large = place.enqueue_many("give", [(LARGE, "go")] * 30)
    place.wait_notes("begin", 20)
    # when another program takes every byte of the disk, also those that the store gives up
    with kept_full(disk_of(place)):
        time.sleep(1.1)  # a process believes its last look at the disk for 1 s
        (place.path / "go").touch()
        # then all outcomes are kept, with the results that are small
        place.finish([*small, *large])
        assert states(place) == {State.SUCCEEDED}
        assert [job.result(0) for job in small] == [b"x" * SMALL] * 30
        for job in large:
            with pytest.raises(ResultNotKept):
                job.result(0)
        with pytest.raises(StoreFull):
            place.enqueue("silent", 0)
    # and the log says so once
    assert worker.output.count("large results are not kept") == 1
    # and when there is room again, the same worker keeps large results
    again = eventually(lambda: try_to_put(place), "a put is accepted")
    assert len(again.result(30)) == LARGE
    assert worker.stop() == 0
    check_counters(place)
    assert {len(runs) for runs in runs_of(place.ledger()).values()} == {1}
    assert len(worker.troubles()) < 10


def try_to_put(place: Place) -> Any:
    try:
        return place.enqueue("give", LARGE, "go")
    except StoreFull:
        return None


def without_reserve(place: Place) -> Path:
    """Fill the disk, the spare blocks and the free pages of a store; the file that does."""
    place.mill.close()
    other = fill_disk(disk_of(place))
    use_up_pages(disk_of(place) / "store")
    return other


def use_up_pages(store: Path) -> None:
    """Write other data to the free pages of a store, until no more fits."""
    code = """
import contextlib, itertools, sys, lmdb
for size in (50_000, 3000, 10):
    env = lmdb.open(sys.argv[1], map_size=1 << 38)
    with contextlib.suppress(lmdb.Error), contextlib.closing(env):
        for n in itertools.count():
            with env.begin(write=True) as txn:
                txn.put(b"other %d %d" % (size, n), b"x" * size)
"""
    subprocess.run([sys.executable, "-c", code, str(store)], check=True)


def test_a_worker_without_a_reserve_waits_for_room_and_then_settles_all(
    place_on: Callable[..., Place],
) -> None:
    # laws 1, 3, 16
    place = place_on()
    worker = place.worker(slots=20).wait_ready()
    jobs = place.enqueue_many("give", [(size, "go") for size in [SMALL, LARGE] * 40])
    place.wait_notes("begin", 20)
    other = without_reserve(place)
    # when jobs end, and the store takes nothing
    (place.path / "go").touch()
    worker.wait_line("the worker keeps the outcome of ended jobs until there is room")
    time.sleep(3)  # a few more refusals
    assert State.RUNNING in states(place)
    # then the log says so once, and nothing ends otherwise
    assert worker.output.count("is full") <= 2
    assert states(place) <= {State.RUNNING, State.READY, State.SUCCEEDED}
    # and all is settled when there is room
    other.unlink()
    records = place.finish(jobs)
    assert {(r.state, r.attempt) for r in records} == {(State.SUCCEEDED, 1)}
    worker.wait_line("the store has room again")
    assert worker.stop() == 0
    check_counters(place)
    assert {len(runs) for runs in runs_of(place.ledger()).values()} == {1}


def test_a_worker_starts_on_a_full_disk_and_its_work_makes_room(
    place_on: Callable[..., Place],
) -> None:
    # laws 1, 16, case Q10
    place = place_on(query="?keep=0")
    count = put_until_full(place, "first")
    assert count > 1000
    with kept_full(disk_of(place)):
        # when a worker starts
        worker = place.worker(slots=20).wait_ready()
        # then it drains the store
        worker._until(lambda: not place.unfinished(), "draining")
        # and the room of the finished jobs takes new ones
        eventually(lambda: put_until_full(place, "second"), "puts are accepted")
        worker._until(lambda: not place.unfinished(), "draining again")
    assert len(runs_of(place.ledger())) > count
    assert {len(runs) for runs in runs_of(place.ledger()).values()} == {1}
    assert worker.stop() == 0
    assert "Traceback" not in worker.output


def test_a_worker_that_cannot_start_on_a_full_disk_says_why(place_on: Callable[..., Place]) -> None:
    # law 16
    place = place_on()
    jobs = place.enqueue_many("silent", [(n,) for n in range(200)])
    other = without_reserve(place)
    # when a worker starts with nothing in reserve
    worker = place.worker(slots=20)
    eventually(lambda: "full" in worker.output or worker.process.poll() is not None, "a sentence")
    # then it serves, or ends with one sentence
    if worker.process.poll() is not None:
        assert worker.process.returncode == 3
        assert worker.output.count("ERROR") == 1
    assert "Traceback" not in worker.output
    # and nothing is lost
    other.unlink()
    place.worker(slots=20)
    assert {record.state for record in place.finish(jobs)} == {State.SUCCEEDED}


def test_a_disk_without_inodes_is_named_and_four_inodes_are_enough(
    place_on: Callable[..., Place],
) -> None:
    # law 16
    place = place_on("size=64m,nr_inodes=50")
    place.enqueue_many("silent", [(n,) for n in range(200)])
    taken = take_inodes(disk_of(place))
    # when a worker starts that cannot make a single file
    worker = place.worker()
    # then it says why
    assert worker.wait() == 3
    assert worker.output.count("has no room for another file") == 1
    assert "Traceback" not in worker.output
    # and four inodes are enough; who waits for a result needs another
    for file in taken[:4]:
        file.unlink()
    worker = place.worker().wait_ready()
    eventually(lambda: states(place) == {State.SUCCEEDED}, "all jobs succeed")
    assert worker.stop() == 0
