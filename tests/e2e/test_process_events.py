"""Functions that an app has called at the start and the stop of its worker processes."""

from __future__ import annotations

import signal

import pytest
from harness import Place, alive, eventually

from tidemill import Tidemill, TidemillError
from tidemill.testing import run_all

APP = """
@mill.on("process_start")
def first():
    note("first", threading.current_thread() is threading.main_thread())

@mill.on("process_start")
async def second():
    mill.lock, mill.ticks = asyncio.Lock(), 0
    async def tick():
        while True:
            await asyncio.sleep(0.01)
            mill.ticks += 1
    mill.ticking = asyncio.create_task(tick())
    note("second")

@mill.on("process_stop")
async def last():
    async with mill.lock:
        note("last", mill.ticks > 0)

@mill.on("process_stop")
def but_last():
    note("but last")
    1 / 0

@mill.task
def sync_job(): note("sync")

@mill.task
async def async_job():
    async with mill.lock:
        note("async")
"""
STARTED = ["first True", "second"]
STOPPED = ["but last", "last True"]


@pytest.mark.everyday
@pytest.mark.parametrize("slots", [1, 4], ids=["main", "threads"])
def test_functions_are_called_before_the_first_and_after_the_last_job(
    place: Place, slots: int
) -> None:
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    assert place.notes() == STARTED
    place.finish([place.enqueue("sync_job")])
    place.finish([place.enqueue("async_job")])  # on the loop of the function at the start
    assert worker.stop() == 0
    assert place.notes() == [*STARTED, "sync", "async", *STOPPED]
    assert "but_last, called at process_stop, raised" in worker.output
    assert "ZeroDivisionError" in worker.output


def test_background_tasks_of_the_start_run_without_any_async_job(place: Place) -> None:
    place.write(APP)
    worker = place.worker(slots=4).wait_ready()
    place.finish([place.enqueue("sync_job")])
    assert worker.stop() == 0
    assert place.notes()[-1] == "last True"


def test_each_process_that_replaces_another_is_started_and_stopped(place: Place) -> None:
    place.write(APP)
    worker = place.worker("--max-jobs", "1", slots=4).wait_ready()
    place.finish([place.enqueue("sync_job")])
    expected = sorted([*STARTED, "sync", *STOPPED, *STARTED])
    eventually(lambda: sorted(place.notes()) == expected, "the next process has started")
    place.finish([place.enqueue("sync_job")])
    eventually(lambda: place.notes().count("but last") == 2, "the second process has stopped")
    assert worker.stop() == 0


HANGS = """
@mill.on("process_stop")
def close_connections():
    note("closing", os.getpid())
    threading.Event().wait()

@mill.task
def job(): pass
"""


def test_a_replaced_process_whose_stop_never_ends_is_killed_and_its_function_named(
    place: Place,
) -> None:
    place.write(HANGS)
    worker = place.worker("--shutdown-timeout", "2").wait_ready()
    old = worker.children()[0].pid
    worker.send(signal.SIGHUP)
    place.wait_notes(f"closing {old}")
    worker.wait_line(f"worker process {old} is killed: it has not ended ")
    eventually(lambda: not alive(old), "the old process is gone")
    assert "in close_connections" in worker.output
    place.finish([place.enqueue("job")])  # by its replacement


def test_a_function_that_raises_at_the_start_ends_the_worker_with_one_reason(place: Place) -> None:
    place.write(
        "@mill.on('process_start')\ndef connect(): raise OSError('no route to the database')\n"
        "@mill.task\ndef job(): note('ran')\n"
    )
    waiting = place.enqueue("job")
    worker = place.worker()
    assert worker.wait() == 2
    assert (
        "the worker ends: its app could not be loaded: connect, called at process_start, raised"
        in worker.output
    )
    assert "OSError: no route to the database" in worker.output
    assert waiting.state == "ready"


def test_the_worker_of_tests_calls_the_functions_too() -> None:
    mill, seen = Tidemill("memory://"), list[str]()
    mill.on("process_start")(lambda: seen.append("start"))
    mill.on("process_stop")(lambda: seen.append("stop"))

    @mill.task(name="job")
    def job() -> None:
        seen.append("job")

    job.enqueue()
    run_all(mill)

    assert seen == ["start", "job", "stop"]


def test_the_worker_of_tests_raises_what_a_function_at_the_start_raises() -> None:
    mill = Tidemill("memory://")
    mill.on("process_start")(lambda: 1 / 0)

    with pytest.raises(TidemillError, match=r"called at process_start, raised(.|\n)*ZeroDivision"):
        run_all(mill)


def test_a_worker_inside_a_program_raises_before_its_block_begins() -> None:
    mill = Tidemill("memory://")
    mill.on("process_start")(lambda: 1 / 0)

    with pytest.raises(TidemillError, match=r"called at process_start"), mill.worker():
        pytest.fail("the block has begun")


def test_a_store_that_is_away_at_the_start_is_told_apart_from_an_error_of_the_app(
    place: Place,
) -> None:
    place.write(
        "from tidemill.errors import BrokerUnavailable\n"
        "@mill.on('process_start')\ndef connect(): raise BrokerUnavailable('the store is away')\n"
        "@mill.task\ndef job(): pass\n"
    )
    worker = place.worker()
    assert worker.wait() == 3
    assert "the store is away" in worker.output
