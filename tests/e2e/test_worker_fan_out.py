"""A job that enqueues all the time ends at its timeout and spares its neighbours (law 8)."""

from __future__ import annotations

import pytest
from harness import ON_SERVERS, PATIENT, Place, eventually

from tidemill.core.job import State

APP = """
@mill.task
def child(): pass

@mill.task(timeout=0.5, retries=0)
def fans_out():
    begin()
    while True:
        child.using(queue="nobody").enqueue()

@mill.task
def neighbour():
    begin()
    until = time.time() + 60
    while time.time() < until and not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()
"""


@ON_SERVERS
@pytest.mark.parametrize("slots", [1, 4], ids=["main", "threads"])
def test_a_fan_out_job_is_interrupted(place: Place, slots: int) -> None:
    # given: neighbours that are still running
    place.write(APP)
    worker = place.worker("-Q", "default", slots=slots, env=PATIENT).wait_ready()
    neighbours = [place.enqueue("neighbour") for _ in range(slots - 1)]
    if neighbours:
        place.wait_notes("begin", slots - 1)
    eventually(worker.children, "the process")
    (before,) = [child.pid for child in worker.children()]
    # when: three jobs do nothing but enqueue, one after the other
    records = [place.finish([place.enqueue("fans_out")])[0] for _ in range(3)]
    # then: each ended at its timeout, in the same process
    assert [record.state for record in records] == [State.FAILED] * 3
    assert all("JobTimeout" in record.error for record in records)
    (place.path / "go").touch()
    assert [(r.state, r.attempt) for r in place.finish(neighbours)] == [
        (State.SUCCEEDED, 1) for _ in neighbours
    ]
    assert [child.pid for child in worker.children()] == [before]
    assert len(place.ledger()) == 3 + 2 * len(neighbours)
    assert "is stuck" not in worker.output
