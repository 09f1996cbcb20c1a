"""Kills in the middle of a purge and of a restore: each job is in one place, and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tidemill import State, Tidemill
from tidemill.brokers.generic.purges import Restored
from tidemill.core.job import is_purged

MANY = 2500

PURGE = "from tidemill import Tidemill; import sys; Tidemill(sys.argv[1]).queue('q').purge()"
RESTORE = PURGE.replace(".purge()", ".restore()")


def run(code: str, url: str, crash: str = "") -> int:
    env = {**os.environ, "TIDEMILL_CRASH": crash}
    done = subprocess.run([sys.executable, "-c", code, url], env=env, timeout=60, check=False)
    return done.returncode


def states(mill: Tidemill) -> Counter[tuple[State, bool]]:
    """How many jobs are in which state, and whether they are purged."""
    return Counter((job.state, is_purged(job.error)) for job in mill.jobs())


def fill(url: str) -> list[str]:
    with Tidemill(url) as mill:
        orders = mill.queue("q")
        sent = orders.put_many(range(MANY))
        sent += [orders.put(n, delay=3600) for n in range(20)]
        return [each.id for each in sent]


@pytest.mark.everyday("purge.piece:1", "store.commit:3")
@pytest.mark.parametrize(
    "crash", ["purge.piece:1", "purge.piece:2", "store.commit:3", "store.committed:3"]
)
def test_kill_in_the_middle_of_a_purge(tmp_path: Path, crash: str) -> None:
    # case Q20
    url = f"lmdb://{tmp_path}/store"
    ids = fill(url)

    assert run(PURGE, url, crash) == -9

    with Tidemill(url) as mill:
        left = states(mill)
        purged = left[State.CANCELLED, True]
        assert 0 < purged < len(ids)
        assert left.total() == len(ids)
        assert mill.queue("q").size() == len(ids) - purged
        assert mill.queues()[0].purged == purged
        # what was purged comes back
        assert mill.queue("q").restore() == Restored(jobs=purged, left=0)
        assert states(mill) == {(State.READY, False): MANY, (State.SCHEDULED, False): 20}
        assert {job.id for job in mill.jobs()} == set(ids)
        # and the next purge takes all
        assert mill.queue("q").purge() == len(ids)


@pytest.mark.parametrize("crash", ["store.commit:4", "store.committed:6"])
def test_kill_in_the_middle_of_a_restore(tmp_path: Path, crash: str) -> None:
    # case Q20
    url = f"lmdb://{tmp_path}/store"
    ids = fill(url)
    assert run(PURGE, url) == 0

    assert run(RESTORE, url, crash) == -9

    with Tidemill(url) as mill:
        back = mill.queue("q").size()
        assert 0 < back < len(ids)
        assert states(mill)[State.CANCELLED, True] == len(ids) - back
        assert mill.queue("q").restore() == Restored(jobs=len(ids) - back, left=0)
        assert states(mill) == {(State.READY, False): MANY, (State.SCHEDULED, False): 20}
        assert {job.id for job in mill.jobs()} == set(ids)


# -- publish ---------------------------------------------------------------------------------------


QUEUES = ("a", "b", "c")
PUBLISHER = """
import sys
from tidemill import Tidemill

mill = Tidemill(sys.argv[1])
for number in range(1000):
    jobs = mill.publish("orders.new", number)
    assert len(jobs) == 3
    print(number, flush=True)
"""


@pytest.mark.everyday("store.commit-14")
@pytest.mark.parametrize("count", [9, 14, 20])
@pytest.mark.parametrize("point", ["store.begun", "store.commit", "store.committed"])
def test_kill_in_the_middle_of_a_publish(tmp_path: Path, point: str, count: int) -> None:
    # case Q20
    url = f"lmdb://{tmp_path}/store"
    with Tidemill(url) as mill:
        for queue in QUEUES:
            mill.queue(queue).bind("orders.*")

    done = subprocess.run(
        [sys.executable, "-c", PUBLISHER, url],
        env={**os.environ, "TIDEMILL_CRASH": f"{point}:{count}"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == -9, done.stderr
    returned = [int(line) for line in done.stdout.split()]
    assert returned
    with Tidemill(url) as mill:
        first, *others = (
            [message.body for message in mill.queue(queue).get_many(1000, timeout=0)]
            for queue in QUEUES
        )
    assert others == [first, first]
    assert first[: len(returned)] == returned
    assert len(first) <= len(returned) + 1
