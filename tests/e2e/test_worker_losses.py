"""A job that kills its worker without a witness is found out, and no other job fails (law 6)."""

from __future__ import annotations

import os
import time

import pytest
from harness import Place, eventually

from tidemill.core.job import Record, State

APP = """
import glob

@mill.task(queue="poison", retries=2)
def poison():
    # As if the machine went down: nothing is left to tell who ran.
    begin()
    supervisor = os.getppid()
    for fd in glob.glob(f"/proc/{supervisor}/fd/*"):
        path = os.readlink(fd)
        if "board" in path and os.path.isfile(path):
            os.unlink(path)
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(30)

@mill.task(queue="poison", retries=2)
def innocent(seconds=0.1, until=""):
    begin()
    while until and not os.path.exists(os.path.join(HERE, until)):
        time.sleep(0.02)
    time.sleep(seconds)
    end()
"""


@pytest.mark.everyday("1-1")
@pytest.mark.parametrize(("processes", "slots"), [(1, 1), (1, 3), (2, 2)])
def test_the_culprit_alone_fails(place: Place, processes: int, slots: int) -> None:
    # law 6: after a loss a job runs alone, so that the culprit is known
    place.write(APP)
    before = [place.enqueue("innocent", 0.3) for _ in range(3)]
    culprit = place.enqueue("poison")
    after = [place.enqueue("innocent") for _ in range(6)]
    # when: whenever everything has died another worker is started
    until = time.monotonic() + 240
    downs = 0
    while not culprit.refresh().state.finished:
        assert time.monotonic() < until, place.outputs()
        worker = place.worker(processes=processes, slots=slots)
        eventually(lambda w=worker: w.process.poll() is not None or ended(culprit), "the end")
        downs += worker.process.poll() is not None
    # then
    assert downs == 3
    record = culprit.refresh()
    assert (record.state, record.losses) == (State.FAILED, 3)
    for record in place.finish([*before, *after]):
        assert record.state is State.SUCCEEDED
        assert record.losses <= 1
    if processes * slots > 1:
        assert any(r.losses for r in place.finish([*before, *after])), "none shared its first run"


def ended(job: object) -> bool:
    record: Record = job.refresh()  # type: ignore[attr-defined]
    return record.state.finished


def test_a_lost_job_holds_up_nobody(place: Place) -> None:
    # law 6: it gets a process of its own, which goes when it is no longer needed
    place.write(APP)
    lost = [place.enqueue("innocent", 0.0, "go") for _ in range(2)]
    worker = place.worker(slots=4).wait_ready()
    place.wait_notes("begin", 2)
    (owner,) = place.mill.broker.owners()
    os.unlink(owner.board)  # as if the machine had gone
    worker.kill_everything()
    # when
    worker = place.worker(slots=2).wait_ready()
    place.wait_notes("begin", 3)  # the first one again
    others = [place.enqueue("innocent") for _ in range(6)]
    place.finish(others)
    # then
    assert lost[0].refresh().state is State.RUNNING
    assert lost[1].refresh().state is State.READY
    assert len(worker.children()) == 2
    (place.path / "go").touch()
    for record in place.finish(lost):
        assert (record.state, record.losses, record.attempt) == (State.SUCCEEDED, 1, 1)
    eventually(lambda: len(worker.children()) == 1, "the extra process goes")
    lines = place.ledger()
    pids = [[line.pid for line in lines if line.id == job.id][-1] for job in lost]
    assert pids[0] == pids[1]
    assert pids[0] not in [line.pid for line in lines for job in others if line.id == job.id]
    assert worker.stop() == 0
