"""Jobs whose worker vanished without a witness run alone (law 6)."""

from __future__ import annotations

import os

from harness import Place, eventually

from tidemill.core.job import State

APP = """
@mill.task(retries=2)
def innocent(seconds=0.1, until=""):
    begin()
    while until and not os.path.exists(os.path.join(HERE, until)):
        time.sleep(0.02)
    time.sleep(seconds)
    end()
"""


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
