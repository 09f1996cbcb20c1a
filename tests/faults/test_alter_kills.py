"""A process is killed while it moves jobs: each job is in one queue, whole, and counted once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill import Tidemill
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.envelope import rank_of
from tidemill.core.job import State

JOBS = 40
MOVER = """
import sys
from tidemill import Tidemill

mill = Tidemill(sys.argv[1])
ids = sys.argv[2:]
for at in range(0, len(ids), 2):
    assert mill.broker.alter(ids[at : at + 2], rank=7, queue="b") == [True, True]
    print(at, flush=True)
"""


@pytest.mark.everyday("store.commit-6")
@pytest.mark.parametrize("count", [1, 6, 13])
@pytest.mark.parametrize("point", ["store.begun", "store.commit", "store.committed"])
def test_kill_in_the_middle_of_moves(tmp_path: Path, point: str, count: int) -> None:
    # law 3, case Q20
    url = f"lmdb://{tmp_path}/store"
    with Tidemill(url) as mill:
        mill.broker.set_queue("b", max_size=JOBS)
        queue = mill.queue("a")
        ids = [queue.put(n, delay=1000 * (n % 2), expires=5000).id for n in range(JOBS)]

    done = subprocess.run(
        [sys.executable, "-c", MOVER, url, *ids],
        env={**os.environ, "TIDEMILL_CRASH": f"{point}:{count}"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == -9, done.stderr
    returned = len(done.stdout.split()) * 2
    with Tidemill(url) as mill:
        rows = {row.name: row for row in mill.broker.stats()}
        records = [mill.broker.get(job_id) for job_id in ids]
        assert None not in records
        moved = [r for r in records if r is not None and r.envelope.queue == "b"]
        # what was answered was kept, and the two of one call went together
        assert len(moved) in (returned, returned + 2)
        assert [r.envelope.id for r in moved] == ids[: len(moved)]
        assert {r.rank for r in moved} <= {7}
        assert {r.rank for r in records[len(moved) :] if r is not None} == {rank_of(0)}
        for name, size in (("a", JOBS - len(moved)), ("b", len(moved))):
            row = rows.get(name)
            counted = (row.ready, row.scheduled) if row is not None else (0, 0)
            assert counted == (size // 2, size // 2)
            listed = mill.broker.find(Filter(queue=name, states=frozenset([State.READY])), 100)
            assert len(listed.records) == size // 2
        # and every ready job can be taken, from its queue alone
        taken = [m.id for m in mill.queue("b").get_many(100, timeout=0)]
        assert taken == ids[: len(moved) : 2]
        assert [m.id for m in mill.queue("a").get_many(100, timeout=0)] == ids[len(moved) :: 2]
