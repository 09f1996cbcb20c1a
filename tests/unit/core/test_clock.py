"""Ids of jobs: in the order of creation, and told apart by their last characters."""

from __future__ import annotations

import subprocess
import sys

from tidemill.core.clock import clock, id_time, new_id, short_id


def test_ids_of_a_process_increase() -> None:
    # the counter begins in the lower half of its range, so it does not wrap here
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
    assert {len(job_id) for job_id in ids} == {26}
    assert abs((id_time(ids[-1]) or 0.0) - clock.wall()) < 60


def test_the_last_characters_tell_ids_of_all_processes_apart() -> None:
    # given the first ids of several processes
    code = "from tidemill.core.clock import new_id\nfor _ in range(100): print(new_id())"
    made = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    ids = [job_id for each in made for job_id in each.stdout.split()]
    # then at most a rare pair has the same short id
    assert len({short_id(job_id) for job_id in ids}) >= 299


def test_only_ids_of_tidemill_are_shortened() -> None:
    job_id = new_id()
    assert short_id(job_id) == job_id[-8:]
    assert short_id(f"{job_id}.0000001") == f"{job_id[-8:]}.0000001"
    assert short_id("invoice-17-of-the-year-2027") == "invoice-17-of-the-year-2027"
