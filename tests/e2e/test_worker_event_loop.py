"""Tasks that end the event loop of their worker process: its other jobs go on, or run again."""

from __future__ import annotations

import time

import pytest
from harness import Place

from tidemill.core.job import State

APP = """
import builtins
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
def closes_descriptors():
    begin()
    os.closerange(3, 5000)

@mill.task(retries=0)
async def stops_the_loop():
    begin()
    asyncio.get_running_loop().stop()
    await asyncio.sleep(30)

@mill.task(retries=0)
def replaces_functions():
    begin()
    def broken(*args, **options): raise SystemError("replaced")
    builtins.len = threading.Lock = threading.Thread = broken

@mill.task(retries=0)
async def neighbour():
    begin()
    while not os.path.exists(HERE + "/go"):
        await asyncio.sleep(0.01)
    end()

@mill.task(retries=0)
def sync_neighbour():
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()

@mill.task(retries=0, timeout=1)
async def blocks():
    begin()
    time.sleep(600)

@mill.task
def short(): return os.getpid()

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


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["closes_descriptors", "stops_the_loop", "replaces_functions"])
def test_a_task_that_breaks_its_interpreter_costs_its_process(
    place: Place, name: str, slots: int
) -> None:
    # law 6
    # Given neighbours that have no retries.
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    neighbours = [place.enqueue(each) for each in ["neighbour", "sync_neighbour"][: slots - 1]]
    if neighbours:
        place.wait_notes("begin", len(neighbours))
    # When a task breaks what its worker process needs.
    job = place.enqueue(name)
    worker.wait_line("gave up")
    (place.path / "go").touch()
    # Then another process runs the neighbours, uncounted, and the culprit has used its attempt.
    for record in place.finish(neighbours):
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1), record
    (record,) = place.finish([job])
    assert record.state is State.FAILED, record
    assert record.error.endswith("gave up")
    # And the worker serves on.
    place.finish([place.enqueue("short"), place.enqueue("ashort")])
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


def test_a_thread_beside_a_blocked_loop_may_finish(place: Place) -> None:
    place.write(APP)
    worker = place.worker(slots=3).wait_ready()
    neighbour = place.enqueue("sync_neighbour")
    place.wait_notes("begin", 1)
    place.finish([place.enqueue("blocks")])
    # When more time has passed than a process has without a heartbeat.
    place.wait_notes("begin", 2)
    time.sleep(6.5)
    (place.path / "go").touch()
    # Then the neighbour has ended there, in its only run.
    (record,) = place.finish([neighbour])
    assert record.state is State.SUCCEEDED
    assert [line.what for line in place.ledger()].count("begin") == 2
    assert worker.stop() == 0
