"""A process that holds a place of a limit is killed at each step: the place is free soon."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import eventually
from servers import NETWORK

from tidemill import Limit, Tidemill
from tidemill.brokers.contract.inspection import HOLDS
from tidemill.core.clock import new_id

SOON = 60.0
"""Seconds until a test gives up; where the promise is shorter, the test says so."""

DB = Limit(name="db", concurrency=1)

HOLDER = """
import sys
from tidemill import Limit, Tidemill
mill = Tidemill(sys.argv[1])
with mill.limits.hold(Limit(name="db", concurrency=1), timeout=60):
    print("held", flush=True)
    sys.stdin.readline()
print("freed", flush=True)
"""


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    network = NETWORK.get(request.param)
    return network(f"t{new_id()}") if network else f"lmdb://{tmp_path}/store"


@pytest.fixture
def mill(url: str) -> Iterator[Tidemill]:
    with Tidemill(url) as mill:
        yield mill


def holder(url: str, crash: str = "") -> subprocess.Popen[str]:
    """A process that holds the place until it gets a line; or it dies at a crash point.

    A process with a crash point reads the end of its input, and so does not wait in its block.
    """
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, url],
        env={**os.environ, "TIDEMILL_CRASH": crash},
        stdin=subprocess.DEVNULL if crash else subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def holds(mill: Tidemill) -> list[str]:
    return [row.name for row in mill.broker.stats() if row.name.startswith(HOLDS)]


@pytest.mark.everyday("lmdb")
@pytest.mark.parametrize(
    ("url", "point"),
    [
        *(("lmdb", "hold.put"), ("lmdb", "hold.begun"), ("lmdb", "hold.ended")),
        *(("redis", "hold.put"), ("postgresql", "hold.begun"), ("http", "hold.ended")),
    ],
    indirect=["url"],
)
def test_a_killed_holder_leaves_the_place_free(mill: Tidemill, url: str, point: str) -> None:
    # given a process that is killed at this step
    with holder(url, point) as process:
        assert process.wait(SOON) == -9
    killed = time.monotonic()
    (left,) = holds(mill)
    # then another gets the place, as soon as a consumer's message would come back
    with mill.limits.hold(DB, timeout=SOON):
        assert time.monotonic() - killed < 20
    # and once its death is noticed, the first hold of a later process deletes what it left
    dead = left.removeprefix(HOLDS)
    eventually(lambda: dead not in {owner.id for owner in mill.broker.owners()}, "its death")
    with Tidemill(url) as later, later.limits.hold(DB, timeout=SOON):
        assert len(holds(later)) == 1
    assert holds(mill) == []
    assert mill.jobs().page().records == []
