"""Running tasks learn that their worker stops; their jobs are settled or go back."""

from __future__ import annotations

import asyncio
import threading

import pytest
from harness import Place

from tidemill.core.job import Outcome, State
from tidemill.core.locks import Stopping

APP = """
from tidemill import WorkerStopping

def work(kind):
    try:
        while True:
            time.sleep(0.01)
    except WorkerStopping:
        note("told", kind)
        if kind == "returns":
            return "saved"
        if kind == "fails":
            raise ValueError("not saved")
        raise
    finally:
        note("cleaned", kind)

@mill.task(retries=0)
def works(kind):
    begin()
    return work(kind)

@mill.task(retries=0)
async def aworks(kind):
    begin()
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        await asyncio.sleep(0.3)  # cleaning up may take longer than a nudge
        note("told", kind)
        if kind == "returns":
            return "saved"
        if kind == "fails":
            raise ValueError("not saved")
        raise
    finally:
        note("cleaned", kind)

@mill.task(retries=0)
def waits():
    job = this_job()
    assert not job.stopping
    begin()
    while not job.wait_stopping(60): pass
    note("told", job.stopping)
    return "saved"

@mill.task(retries=0)
async def awaits():
    job = this_job()
    assert not await job.await_stopping(0.01)
    begin()
    assert await job.await_stopping()
    note("told", job.stopping)
    return "saved"

@mill.task(retries=0)
def gives_back():
    begin()
    this_job().wait_stopping()
    raise WorkerStopping

@mill.task(retries=0)
def raises_early(): raise WorkerStopping("nobody stops")
"""

EXITS = """
import atexit

def at_exit():
    note("exiting")
    time.sleep(3)  # longer than a moment
    note("exited")

@mill.task
def registers():
    atexit.register(at_exit)
"""

POOLS = pytest.mark.parametrize("slots", [1, 4], ids=["main", "threads"])


@POOLS
@pytest.mark.parametrize("name", ["works", "aworks"])
@pytest.mark.parametrize("kind", ["raises", "returns", "fails"])
def test_a_job_is_interrupted_before_its_worker_is_killed(
    place: Place, name: str, kind: str, slots: int
) -> None:
    # Given a job that would run for ever.
    place.write(APP)
    worker = place.worker("--shutdown-timeout", "4", slots=slots).wait_ready()
    job = place.enqueue(name, kind)
    place.wait_notes("begin")
    # When the worker stops, the task hears of the stop and cleans up.
    code = worker.stop()
    assert place.notes()[1:] == [f"told {kind}", f"cleaned {kind}"]
    record = job.refresh()
    if kind == "raises":  # Then the job goes back uncounted, and its trail says why.
        assert (record.state, record.attempt) == (State.READY, 0), record
        assert "its worker stops" in record.log[-1][1]
        assert code == 1
    elif kind == "returns":  # Or its result counts.
        assert (record.state, job.result()) == (State.SUCCEEDED, "saved")
        assert code == 0
    else:  # Or its error.
        assert record.state is State.FAILED
        assert "ValueError: not saved" in record.error
        assert code == 0
    assert [attempt.outcome for attempt in record.attempts if attempt.outcome == Outcome.RETRY] == (
        [Outcome.RETRY] if kind == "fails" else []
    )


@POOLS
@pytest.mark.parametrize("name", ["waits", "awaits"])
def test_a_task_can_wait_for_the_end_of_its_worker(place: Place, name: str, slots: int) -> None:
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    job = place.enqueue(name)
    place.wait_notes("begin")
    assert worker.stop() == 0
    assert place.wait_notes("told") == ["told True"]
    assert job.result() == "saved"


@POOLS
def test_a_task_may_give_its_job_back(place: Place, slots: int) -> None:
    # Given one task that raises WorkerStopping although nobody stops: an error as any other.
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    (record,) = place.finish([place.enqueue("raises_early")])
    assert record.state is State.FAILED
    assert "WorkerStopping: nobody stops" in record.error
    # And one that waits for the end of its worker; then the job goes back at once.
    job = place.enqueue("gives_back")
    place.wait_notes("begin")
    assert worker.stop() == 1
    assert (job.refresh().state, job.refresh().attempt) == (State.READY, 0)


@POOLS
def test_atexit_functions_run_to_their_end(place: Place, slots: int) -> None:
    place.write(EXITS)
    worker = place.worker(slots=slots).wait_ready()
    place.finish([place.enqueue("registers")])
    # When the worker stops; then it waits for that.
    assert worker.stop() == 0
    assert place.notes() == ["exiting", "exited"]


def test_stopping_wakes_threads_and_event_loops() -> None:
    # Given a thread and two coroutines that wait; one of them gives up before.
    stopping = Stopping()
    heard: list[bool] = []
    thread = threading.Thread(target=lambda: heard.append(stopping.wait(60)))
    thread.start()

    async def wait() -> list[bool]:
        early = await stopping.await_set(0.01)
        waiting = asyncio.create_task(stopping.await_set())
        await asyncio.sleep(0)
        await asyncio.to_thread(stopping.set)
        return [early, await waiting, await stopping.await_set(0)]

    # When it is set; then all who still wait hear it, and who comes later does not wait.
    assert asyncio.run(wait()) == [False, True, True]
    thread.join()
    assert heard == [True]
