"""Real workers on each broker that processes share: the common laws and cases."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import (
    SLACK,
    Place,
    alive,
    check_counters,
    check_no_overlap,
    eventually,
    open_place,
    runs_of,
)
from servers import NETWORK, rabbitmq_url

from tidemill import JobFailed, JobNotFound, ResultTimeout
from tidemill.brokers.contract.features import Feature
from tidemill.core.clock import new_id
from tidemill.core.job import Record, State

S = State

APP = """
@mill.task(retries=Retries(3, delay=0))
def long(seconds=30.0):
    begin()
    until = time.time() + seconds
    while time.time() < until and not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()

@mill.task(retries=Retries(3, delay=0))
def holds(seconds): begin(); hold_gil(seconds / 2); hold_gil(seconds / 2); end()

@mill.task
def short(n=0): begin(); end(); return n

@mill.task(retries=Retries(2, delay=0.02))
def fails():
    note("ran")
    raise ValueError("broken")

@mill.task(retries=Retries(2, delay=0))
def kills(): begin(); os.kill(os.getpid(), signal.SIGKILL)

@mill.task
def watches():
    begin()
    while not this_job().cancelled:
        time.sleep(0.01)
    return "seen"

@mill.task(retries=Retries(3, delay=1000, jitter=False))
def again():
    note("again", this_job().attempt, time.time())
    if this_job().attempt < 3:
        raise Retry(delay=0.2)
    raise Fail("enough")
"""


STORES = ["lmdb", *sorted(NETWORK)]
URLS = NETWORK | {"rabbitmq": lambda name: f"{rabbitmq_url()}?prefix={name}"}
WITH_RABBITMQ = pytest.mark.parametrize("at", [*STORES, "rabbitmq"], indirect=True)
"""Runs a test on RabbitMQ, too, which keeps no results and lists only failed jobs."""
ON_TWO = pytest.mark.parametrize("at", ["lmdb", "rabbitmq"], indirect=True)
"""Runs a test of the worker's part: on one store, whose part the contract proves, and RabbitMQ."""


@pytest.fixture(params=STORES)
def at(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Open a place on the broker, with options for its url."""
    with contextlib.ExitStack() as opened:

        def open_at(**options: object) -> Place:
            name = "t" + new_id()[-12:]
            if request.param == "lmdb":  # which hears at once of a death on its machine
                url = f"lmdb://{tmp_path}/{name}"
            else:
                url = URLS[request.param](name)
                url += "".join(f"&{name}={value}" for name, value in options.items())
            place = opened.enter_context(open_place(tmp_path, url))
            place.write(APP)
            return place

        yield open_at


@pytest.fixture
def place(at: Callable[..., Place]) -> Place:
    return at()


def failed(place: Place, count: int = 1) -> list[Record]:
    """The records of failed jobs, once there are so many."""

    def enough() -> list[Record]:
        jobs = [job.record for job in place.mill.jobs(state="failed")]
        return jobs if len(jobs) >= count else []

    return eventually(enough, f"{count} failed")


def lists_jobs(place: Place) -> bool:
    """True when the broker lists all jobs; RabbitMQ lists only failed jobs."""
    return Feature.INSPECT in place.mill.broker.features


@WITH_RABBITMQ
@pytest.mark.everyday
def test_retries_are_counted_and_listed(place: Place) -> None:  # case T3, law 7
    worker = place.worker("--name", "smith").wait_ready()
    job, once = place.enqueue("fails"), place.enqueue("fails", retries=0)
    records = {record.envelope.id: record for record in failed(place, 2)}
    record = records[job.id]
    assert len(place.notes()) == 3 + 1
    assert (record.attempt, records[once.id].attempt) == (3, 1)
    assert record.error == "ValueError: broken"
    if lists_jobs(place):
        assert [(a.number, a.worker, a.error) for a in record.attempts] == [
            (number, "smith", "ValueError: broken") for number in (1, 2, 3)
        ]
        for attempt in record.attempts:
            assert attempt.started <= attempt.ended
            assert 'raise ValueError("broken")' in attempt.traceback
            assert "def fails" not in attempt.traceback
            assert "tidemill/worker" not in attempt.traceback
    assert worker.stop() == 0


@ON_TWO
def test_retry_comes_in_its_time_and_fail_at_once(place: Place) -> None:  # case T4
    place.worker().wait_ready()
    place.enqueue("again")
    (record,) = failed(place)
    assert (record.error, record.attempt) == ("Fail: enough", 3)
    times = [float(line.split()[2]) for line in place.notes()]
    for first, second in itertools.pairwise(times):
        assert second - first >= 0.2  # and in no 1000 s


@WITH_RABBITMQ
@pytest.mark.everyday
def test_a_timeout_ends_the_work(place: Place) -> None:  # cases T6, T7, law 8
    place.worker(slots=2).wait_ready()
    put = time.time()
    place.enqueue("long", 30.0, timeout=1, retries=0)
    begun = float(place.wait_notes("begin")[0].split()[4])
    (record,) = failed(place)
    assert time.time() - put >= 1.0  # the timeout may have begun long before the note
    assert time.time() - begun < 2.0 + SLACK
    assert "JobTimeout" in record.error
    if lists_jobs(place):
        (attempt,) = record.attempts
        assert 1.0 <= attempt.ended - attempt.started + 0.01 < 2.0 + SLACK
        assert "in long" in attempt.traceback


@WITH_RABBITMQ
@pytest.mark.everyday
def test_kill_of_one_process(place: Place) -> None:  # case T9, laws 5, 6
    worker = place.worker(processes=2, slots=1).wait_ready()
    jobs = [place.enqueue("long") for _ in range(2)]
    victim = place.wait_notes("begin", 2)[0].split()
    waiting = place.enqueue_many("short", [(n,) for n in range(20)])
    os.kill(int(victim[3]), signal.SIGKILL)
    killed = time.time()
    place.wait_notes(f"begin {victim[1]} 2")
    again = next(line for line in place.ledger() if line.id == victim[1] and line.attempt == 2)
    assert again.time - killed < 1.0 + SLACK
    (place.path / "go").touch()
    place.wait_notes("end", 2 + 20)
    for job in waiting:  # the jobs held in advance ran once, as the first attempt
        assert [begin.attempt for begin, _ in runs_of(place.ledger())[job.id]] == [1]
    if lists_jobs(place):
        for record in place.finish([*jobs, *waiting]):
            assert record.state is S.SUCCEEDED
            assert record.attempt == (2 if record.envelope.id == victim[1] else 1)
    assert worker.stop() == 0
    if lists_jobs(place):
        check_counters(place)


@ON_TWO
def test_a_job_that_kills_its_worker_fails(place: Place) -> None:  # case T9, law 6
    place.worker(slots=1)
    place.enqueue("kills")
    (record,) = failed(place)
    assert record.attempt == 3
    assert "SIGKILL" in record.error
    assert len(place.notes()) == 3


@pytest.mark.parametrize("at", ["lmdb"], indirect=True)
def test_kill_of_the_supervisor(place: Place) -> None:  # case T10
    worker = place.worker(processes=2, slots=2).wait_ready()
    job = place.enqueue("long", 300.0)
    place.wait_notes("begin", 1)
    processes = [process.pid for process in worker.children()]
    os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: not any(map(alive, processes)), "all end by themselves", 2.0 + SLACK)
    worker.wait()
    place.worker(slots=4)
    place.wait_notes(f"begin {job.id} 2")


@pytest.mark.everyday
@pytest.mark.parametrize("at", ["lmdb", "redis", "postgresql"], indirect=True)
def test_kill_of_everything_with_another_worker(place: Place) -> None:
    # case T10, laws 5, 6: whoever is left on the machine reads the board; the lease is far longer
    worker = place.worker(processes=2, slots=1).wait_ready()
    jobs = [place.enqueue("long", 300.0) for _ in range(2)]
    place.wait_notes("begin", 2)
    place.worker(processes=1, slots=4).wait_ready()
    worker.kill_everything()
    killed = time.time()
    place.wait_notes("begin", 4)
    for line in place.ledger()[2:]:
        assert line.attempt == 2  # its board was still there
        assert line.time - killed < 1.0 + SLACK
    (place.path / "go").touch()
    for record in place.finish(jobs):
        assert (record.state, record.attempt, record.losses) == (S.SUCCEEDED, 2, 0)
        assert "died with its processes" in record.attempts[0].error
    check_counters(place)


@WITH_RABBITMQ
@pytest.mark.everyday
@pytest.mark.parametrize("patient", [True, False])
def test_shutdown(place: Place, patient: bool) -> None:  # case T11
    worker = place.worker("--shutdown-timeout", "10" if patient else "0.2", slots=2).wait_ready()
    job = place.enqueue("long", 300.0)
    place.wait_notes("begin")
    worker.send(signal.SIGTERM)
    if patient:
        (place.path / "go").touch()
    assert worker.wait() == (0 if patient else 1)
    if lists_jobs(place):
        record = job.refresh()
        assert record.state is (S.SUCCEEDED if patient else S.READY)
        assert record.attempt == (1 if patient else 0)
    (place.path / "go").touch()
    assert place.worker("--burst").wait() == 0
    begins = [line for line in place.ledger() if (line.what, line.id) == ("begin", job.id)]
    assert [line.attempt for line in begins] == ([1] if patient else [1, 1])  # uncounted


@pytest.mark.parametrize("at", ["redis", "postgresql", "http", "rabbitmq"], indirect=True)
def test_a_long_job_that_holds_the_lock_runs_once(at: Callable[..., Place]) -> None:  # case T12
    place = at(owner_lease=4)
    place.worker(slots=2).wait_ready()
    place.worker(slots=2).wait_ready()
    job = place.enqueue("holds", 9.0)
    place.wait_notes("end")
    place.enqueue("short")
    place.wait_notes("end", 2)
    assert len(runs_of(place.ledger())[job.id]) == 1
    if lists_jobs(place):
        (record,) = place.finish([job])
        assert (record.state, record.attempt, record.losses) == (S.SUCCEEDED, 1, 0)


@pytest.mark.everyday
def test_cancel_and_terminate(place: Place) -> None:  # case T14, law 14
    worker = place.worker(slots=3).wait_ready()
    seen = place.enqueue("watches")
    place.wait_notes(f"begin {seen.id}")
    assert seen.cancel()
    eventually(lambda: seen.refresh().state.finished, "it hears of it")
    job = place.enqueue("long")
    place.wait_notes(f"begin {job.id}")
    asked = time.time()
    assert job.cancel(terminate=True)
    record = place.wait_state(job, S.CANCELLED)
    assert record.finished - asked < 1.0 + SLACK
    waiting = place.enqueue("short", delay=100)
    assert waiting.cancel()
    assert waiting.refresh().state is S.CANCELLED
    assert worker.stop() == 0


def elsewhere(place: Place, code: str) -> subprocess.Popen[str]:
    """Run code in another process that has ``q`` and ``mill``."""
    prelude = (
        f"import sys, time, os\nfrom tidemill import Tidemill\nmill = Tidemill({place.url!r})\n"
        "q = mill.queue('q')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.everyday
def test_a_put_of_another_process_wakes_the_get(place: Place) -> None:  # case Q2
    code = "print(mill.broker.url, flush=True)\ninput()\nq.put(time.monotonic())"
    with elsewhere(place, code) as putter:
        putter.stdout.readline()
        timer = threading.Timer(0.3, lambda: putter.communicate("go\n"))
        timer.start()
        message = place.mill.queue("q").get(timeout=30)
        woken = time.monotonic()
        timer.join()
    assert woken - message.body < 10  # the commit is in it too, and nobody looks so often
    assert message.ack()


@pytest.mark.everyday
def test_a_put_that_returned_survives_the_kill_of_its_producer(place: Place) -> None:  # case Q7
    code = "for n in range(10**9):\n    q.put(n)\n    print(n, flush=True)"
    with elsewhere(place, code) as producer:
        said = [int(producer.stdout.readline()) for _ in range(50)]
        producer.kill()
        said += [int(line) for line in producer.stdout.read().split()]
    found = []
    queue = place.mill.queue("q")
    while (message := queue.get(timeout=0)) is not None:
        found.append(message.body)
        message.ack()
    assert found == list(range(len(found)))
    assert len(found) in (said[-1] + 1, said[-1] + 2)  # one more may have been put and not said


def test_a_killed_consumers_message_comes_back(at: Callable[..., Place]) -> None:  # case Q7
    place = at(owner_lease=1)
    place.mill.queue("q").put("once", ttr=1.5)
    with elsewhere(place, "m = q.get(timeout=30)\nprint(m.body, flush=True)\ninput()") as consumer:
        assert consumer.stdout.readline() == "once\n"
        consumer.kill()
    message = place.mill.queue("q").get(timeout=30)
    assert (message.body, message.attempt) == ("once", 2)
    message.ack()


@pytest.mark.everyday("lmdb")
def test_results_are_waited_for_in_another_process_and_in_asyncio(place: Place) -> None:
    # case T16
    job, bad, never = place.enqueue("short", 7), place.enqueue("fails"), place.enqueue("watches")
    code = f"print(mill.job({job.id!r}).result(timeout=60))"
    with elsewhere(place, code) as waiting:
        place.worker(slots=4)
        assert waiting.communicate(timeout=90)[0] == "7\n"

    async def wait() -> None:
        async with asyncio.timeout(60):
            assert await job.aresult() == 7
            with pytest.raises(JobFailed, match="broken") as raised:
                await bad.aresult()
            assert 'raise ValueError("broken")' in raised.value.traceback
            with pytest.raises(ResultTimeout):
                await never.aresult(timeout=0.2)

    asyncio.run(wait())
    with pytest.raises(JobNotFound):
        place.mill.job("unknown").result(timeout=1)
    never.cancel()


@pytest.mark.everyday
def test_two_producers_two_workers_and_every_job_once(place: Place) -> None:  # case Q8
    for _ in range(2):
        place.worker(processes=2, slots=4)
    jobs = [job for n in range(20) for job in place.enqueue_many("short", [(n,)] * 25)]
    place.finish(jobs, 60)
    runs = runs_of(place.ledger())
    assert {len(one) for one in runs.values()} == {1}
    assert len(runs) == 500
    check_no_overlap(place.ledger())
    check_counters(place)


def test_a_fork_has_lines_of_its_own(place: Place) -> None:  # case Q12
    queue = place.mill.queue("q")
    queue.put("parent")
    with elsewhere(
        place,
        "q.put('a')\npid = os.fork()\nq.put(f'{pid == 0}')\n"
        "if pid: os.waitpid(pid, 0)\nmill.close()\nos._exit(0)",
    ) as forking:
        assert forking.wait(60) == 0
    found = []
    while (message := queue.get(timeout=0)) is not None:
        found.append(message.body)
        message.ack()
    assert sorted(found) == ["False", "True", "a", "parent"]
