"""A publisher is killed in the middle: each message is in all bound queues, or in none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill import Tidemill

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
