"""Recycling and reloads lower the capacity no longer than a process needs to start."""

from __future__ import annotations

import signal

from harness import Place, eventually

APP = """
@mill.task
def long():
    begin()
    until = time.time() + 60
    while time.time() < until and not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()

@mill.task
def short(): begin(); end()
"""


def test_reloads_beside_long_jobs(place: Place) -> None:
    # given: long jobs in half of the slots
    place.write(APP)
    worker = place.worker(slots=8).wait_ready()
    jobs = [place.enqueue("long") for _ in range(4)]
    place.wait_notes("begin", 4)
    # when
    for count in range(1, 7):
        worker.send(signal.SIGHUP)
        worker.wait_line("reloading", count)
        place.finish([place.enqueue("short")])
    # then: short jobs run beside the long ones
    (place.path / "go").touch()
    place.finish(jobs)
    assert len(place.ledger()) == 2 * (4 + 6)
    eventually(lambda: len(worker.children()) == 1, "one process is left")
    assert worker.stop() == 0


def test_recycling_beside_long_jobs(place: Place) -> None:
    # given: each process will be replaced while one of its jobs still runs
    place.write(APP)
    worker = place.worker("--max-jobs", "3", slots=8).wait_ready()
    jobs = []
    for _ in range(6):
        # when
        jobs.append(place.enqueue("long"))
        place.wait_notes(f"begin {jobs[-1].id}")
        # then: as many slots as are free do their work
        place.finish([place.enqueue("short") for _ in range(4)])
    (place.path / "go").touch()
    place.finish(jobs)
    assert worker.stop() == 0


def test_no_more_processes_than_slots_pile_up(place: Place) -> None:
    # given: old processes whose jobs take all slots
    place.write(APP)
    worker = place.worker("--max-jobs", "1", slots=2).wait_ready()
    jobs = [place.enqueue("long") for _ in range(2)]
    place.wait_notes("begin", 2)
    # when
    late = place.enqueue("short")
    worker.wait_line("take all slots")
    assert len(worker.children()) == 2
    # then: the next process starts when a job has ended
    (place.path / "go").touch()
    place.finish([late, *jobs])
    assert worker.stop() == 0
