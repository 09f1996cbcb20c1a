"""Tasks that fork: a child never speaks for its worker process, and never outlives that process."""

from __future__ import annotations

import pytest
from harness import Place, alive, eventually

from tidemill.core.job import State

APP = """
import concurrent.futures, multiprocessing

def square(n): return n * n

def pool_of(method):
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(square, range(4))

def executor_of(method):
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        return list(pool.map(square, range(4)))

def process_of(method):
    process = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    while process.exitcode is None:  # None while a thread that starts a process reaps this one
        process.join()
    return process.exitcode

@mill.task
def makes(what, method): return globals()[what](method)

@mill.task
async def amakes(what, method): return globals()[what](method)

@mill.task
def runs(): return subprocess.run(["echo", "hello"], capture_output=True, text=True).stdout

def wait_for(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def end_child(how):
    if how == "return": return
    if how == "raise": raise ValueError("from the child")
    if how == "exit": sys.exit(5)
    if how == "_exit": os._exit(6)
    if how == "kill": os.kill(os.getpid(), signal.SIGTERM)

@mill.task(retries=0)
def forks(how):
    begin()
    child = os.fork()
    if child:
        end()
        return wait_for(child)
    note("child", how)
    this_job().progress(1, 2)
    end_child(how)
    return "from the child"

@mill.task(retries=0)
async def aforks(how):
    begin()
    child = os.fork()
    if child:
        end()
        return await asyncio.to_thread(wait_for, child)
    note("child", how)
    if how == "await":
        await asyncio.sleep(0.01)
        note("child goes on")
    end_child(how)
    return "from the child"

@mill.task(retries=0)
async def counts(name):
    for number in range(10):
        note("counted", name, number)
        await asyncio.sleep(0.02)

@mill.task(retries=0)
def leaves_child():
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    note("left", child, os.getpid())

@mill.task(retries=0)
def leaves_child_and_dies():
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    note("left", child, os.getpid())
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

@mill.task
def short(): begin(); end()
"""

POOLS = pytest.mark.parametrize("slots", [1, 4], ids=["main", "threads"])
SQUARES = [0, 1, 4, 9]
MADE = {"pool_of": SQUARES, "executor_of": SQUARES, "process_of": -15}
"""Results of each way to make processes; -15 is a death by SIGTERM."""

ENDS = {"return": 0, "raise": 1, "exit": 5, "_exit": 6, "kill": -15}
"""The exit code of a child, by the way in which it leaves the task."""


def pids(place: Place) -> list[int]:
    return [process.pid for worker in place.workers for process in worker.children()]


@pytest.mark.everyday("makes")
@POOLS
@pytest.mark.parametrize("kind", ["makes", "amakes"])
def test_multiprocessing_works_in_tasks(place: Place, kind: str, slots: int) -> None:
    # Given a worker; when tasks use multiprocessing with all its start methods.
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    eventually(worker.children, "the process")
    before = pids(place)
    ways = [(what, "fork") for what in MADE] + [("pool_of", "spawn"), ("pool_of", "forkserver")]
    jobs = {way: place.enqueue(kind, *way) for way in ways}
    # Then all end with the right value, and the worker process is still the same.
    place.finish(jobs.values())
    for (what, method), job in jobs.items():
        assert job.result() == MADE[what], (what, method)
    assert place.enqueue("runs").result(60) == "hello\n"
    assert pids(place) == before
    assert worker.stop() == 0


@pytest.mark.everyday
@POOLS
@pytest.mark.parametrize("kind", ["forks", "aforks"])
def test_child_that_leaves_the_task_is_no_second_worker(
    place: Place, kind: str, slots: int
) -> None:
    # Given a task whose forked child leaves the task in any way.
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    eventually(worker.children, "the process")
    before = pids(place)
    jobs = {how: place.enqueue(kind, how) for how in ENDS}
    # When the parent waits for the child; then the child ended as a program of its own would.
    for record in place.finish(jobs.values()):
        assert record.state is State.SUCCEEDED, record
        assert record.attempt == 1
        assert record.progress is None  # the child's word does not count
    assert {how: job.result() for how, job in jobs.items()} == ENDS
    # And each job has run once, in the one process.
    assert len(place.ledger()) == 2 * len(ENDS)
    place.finish([place.enqueue("short") for _ in range(8)])
    assert {line.pid for line in place.ledger()} == set(before)
    assert worker.stop() == 0
    assert "from the child" in worker.output  # what it raised can be read


@POOLS
def test_child_of_a_coroutine_does_not_run_the_event_loop(place: Place, slots: int) -> None:
    # Given async neighbours; when the forked child of a coroutine awaits.
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    names = [str(number) for number in range(slots - 1)]
    counting = [place.enqueue("counts", name) for name in names]
    for name in names:
        place.wait_notes(f"counted {name}")
    forking = place.enqueue("aforks", "await")
    # Then the child has ended, and the neighbours have made each step once.
    (record,) = place.finish([forking])
    assert record.state is State.SUCCEEDED, record
    assert isinstance(forking.result(), int)
    assert [record.state for record in place.finish(counting)] == [State.SUCCEEDED] * len(names)
    notes = place.notes()
    assert "child goes on" not in notes
    steps = sorted(line for line in notes if line.startswith("counted"))
    assert steps == sorted(f"counted {name} {number}" for name in names for number in range(10))
    assert worker.stop() == 0


@POOLS
@pytest.mark.parametrize("name", ["leaves_child", "leaves_child_and_dies"])
def test_child_dies_with_its_worker_process(place: Place, name: str, slots: int) -> None:  # law 8
    # Given a task that leaves a child behind, which holds copies of all descriptors.
    place.write(APP)
    worker = place.worker(slots=slots).wait_ready()
    job = place.enqueue(name)
    _, child, parent = place.wait_notes("left")[0].split()
    # When the process is killed, or the worker stops.
    (record,) = place.finish([job])
    if name == "leaves_child":
        assert record.state is State.SUCCEEDED
        assert alive(int(child))
        assert worker.stop() == 0
    else:
        assert record.state is State.FAILED
        assert "SIGKILL" in record.error
        place.finish([place.enqueue("short")])
    # Then the child is gone, too.
    eventually(lambda: not alive(int(child)) and not alive(int(parent)), "the child is dead")
