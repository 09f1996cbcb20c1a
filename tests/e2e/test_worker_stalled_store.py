"""A store that does not answer holds up no timeout and no signal (law 8)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from harness import SLACK, alive, eventually, runs_of
from stalls import open_stalling

from tidemill.core.job import State

APP = """
@mill.task(timeout=1.0, retries=0)
def sleeps():
    begin()
    time.sleep(60)

@mill.task
def brief():
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.005)
    end()
"""
TIMEOUT = 1.0


@pytest.mark.parametrize("kind", ["lmdb", "redis"])
def test_a_timeout_falls_while_the_store_is_stalled(kind: str, tmp_path: Path) -> None:
    with open_stalling(kind, tmp_path) as (place, stalled):
        # given: a job that nothing can interrupt
        place.write(APP)
        worker = place.worker(slots=2).wait_ready()
        (old,) = [child.pid for child in eventually(worker.children, "the process")]
        job = place.enqueue("sleeps")
        place.wait_notes("begin")
        # when
        with stalled(place):
            # then: its process is replaced and killed while nothing can be stored
            worker.wait_line("is stuck and is replaced")
            eventually(lambda: not alive(old), "the stuck process is killed")
            eventually(worker.children, "its replacement")
        # and the job has used its one attempt, for no longer than it may
        (record,) = place.finish([job])
        assert (record.state, record.attempt) == (State.FAILED, 1)
        assert "JobTimeout" in record.error
        (attempt,) = record.attempts
        assert TIMEOUT <= attempt.ended - attempt.started + 0.01 <= TIMEOUT + 1.0 + SLACK
        assert worker.stop() == 0


@pytest.mark.everyday("redis")
@pytest.mark.parametrize("kind", ["http", "redis"])
def test_a_stall_longer_than_the_owner_lease_gives_up_nobody(kind: str, tmp_path: Path) -> None:
    # laws 5, 19: nobody could be heard
    lease = 5  # time enough for both workers to come back in
    with open_stalling(kind, tmp_path, f"?owner_lease={lease}") as (place, stalled):
        # given: two workers, and a job that runs in each
        place.write(APP)
        workers = [place.worker(slots=1).wait_ready() for _ in range(2)]
        jobs = [place.enqueue("brief") for _ in workers]
        place.wait_notes("begin", 2)
        # when
        began = time.monotonic()
        with stalled(place):
            for worker in workers:
                worker.wait_line("trying again")
            eventually(lambda: time.monotonic() - began > lease + 1, "a long stall")
        for worker in workers:
            worker.wait_line("the broker is back")
        (place.path / "go").touch()
        # then
        for record in place.finish(jobs):
            assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
        eventually(lambda: not place.unfinished(), "nobody holds them")
        assert {len(runs) for runs in runs_of(place.ledger()).values()} == {1}
        assert [worker.stop() for worker in workers] == [0, 0]
