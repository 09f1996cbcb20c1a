"""Tasks that end the event loop of their worker process: its other jobs go on, or run again."""

from __future__ import annotations

import pytest
from harness import Place

from tidemill.core.job import State

APP = """
async def exits(): sys.exit(3)
async def interrupts(): raise KeyboardInterrupt("from a subtask")

def exits_in_callback(): sys.exit(3)

@mill.task(retries=0)
async def starts(what):
    # Start a subtask that nobody awaits, and wait.
    begin()
    subtask = asyncio.create_task(globals()[what]())
    try:
        await asyncio.sleep(30)
    finally:
        note("cleaned")

@mill.task(retries=0)
async def calls_back():
    begin()
    asyncio.get_running_loop().call_soon(exits_in_callback)
    await asyncio.sleep(30)

@mill.task(retries=0)
async def awaits(what):
    begin()
    await asyncio.gather(globals()[what](), asyncio.sleep(30))

@mill.task(retries=0)
async def cancels_everything():
    begin()
    for task in asyncio.all_tasks():
        if task is not asyncio.current_task():
            task.cancel()

@mill.task(retries=0)
async def neighbour():
    begin()
    while not os.path.exists(HERE + "/go"):
        await asyncio.sleep(0.01)
    end()

@mill.task(retries=0, timeout=1)
async def blocks():
    begin()
    time.sleep(600)

@mill.task
async def ashort(): return os.getpid()
"""

CULPRITS = {
    ("starts", "exits"): "a subtask or callback of the job raised SystemExit: 3",
    ("starts", "interrupts"): "raised KeyboardInterrupt: from a subtask",
    ("awaits", "exits"): "SystemExit: 3",
    ("calls_back",): "a subtask or callback of the job raised SystemExit: 3",
}
"""Ways to end the loop, each with the error of its job."""


@pytest.mark.parametrize("culprit", CULPRITS, ids=" ".join)
def test_neighbours_go_on_when_a_task_ends_the_event_loop(
    place: Place, culprit: tuple[str, ...]
) -> None:
    # Given two neighbours on the event loop.
    place.write(APP)
    worker = place.worker(slots=4).wait_ready()
    neighbours = [place.enqueue("neighbour") for _ in range(2)]
    place.wait_notes("begin", 2)
    # When a task ends the loop; then its own job ends with the reason.
    (record,) = place.finish([place.enqueue(*culprit)])
    assert record.state is State.FAILED, record
    assert CULPRITS[culprit] in record.error
    if culprit[0] == "starts":
        assert "cleaned" in place.notes()
        assert culprit[1] in record.attempts[0].traceback
    # And the neighbours end by themselves, each run once, in the same process.
    fresh = place.enqueue("ashort").result(60)
    (place.path / "go").touch()
    for record in place.finish(neighbours):
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
    assert [line.what for line in place.ledger()].count("begin") == 3
    assert [child.pid for child in worker.children()] == [fresh]
    assert worker.stop() == 0


def test_a_job_that_is_cancelled_before_it_begins_runs_later(place: Place) -> None:
    # Given tasks that cancel all tasks of the event loop, among them tasks just made.
    place.write(APP)
    worker = place.worker(slots=4).wait_ready()
    jobs = place.enqueue_many("cancels_everything", [()] * 40)
    # Then no job is lost, and the worker serves on.
    place.finish(jobs)
    place.finish([place.enqueue("ashort") for _ in range(8)])
    assert worker.stop() == 0


def test_neighbours_of_a_coroutine_that_blocks_the_loop_run_again_soon(place: Place) -> None:
    # Given two neighbours on the event loop of a worker with a long grace.
    place.write(APP)
    place.worker("--stuck-grace", "600", slots=3).wait_ready()
    neighbours = [place.enqueue("neighbour", retries=3) for _ in range(2)]
    place.wait_notes("begin", 2)
    # When a coroutine blocks the loop past its timeout.
    (record,) = place.finish([place.enqueue("blocks")])
    assert "JobTimeout" in record.error
    # Then the neighbours, which cannot finish there, begin again elsewhere, uncounted.
    place.wait_notes("begin", 5)
    (place.path / "go").touch()
    for record in place.finish(neighbours):
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1)
