"""Two apps on one store: a job waits for a worker whose app has its task."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Place, eventually, open_place, runs_of
from servers import NETWORK, rabbitmq_url

from tidemill.core.clock import new_id
from tidemill.core.job import State

APP = """
@mill.task
def {name}(n=0): begin(); note("{name}", n); end()
"""

Pair = tuple[Place, Place]
STORES: dict[str, Callable[[str], str]] = NETWORK


@contextlib.contextmanager
def open_pair(folder: Path, url: str) -> Iterator[Pair]:
    """Two apps on one store, with the tasks ``ours`` and ``theirs``."""
    with contextlib.ExitStack() as stack:
        pair = []
        for name in ("ours", "theirs"):
            (folder / name).mkdir()
            place = stack.enter_context(open_place(folder / name, url))
            place.write(APP.format(name=name))
            pair.append(place)
        yield pair[0], pair[1]


@pytest.fixture(params=["lmdb", *sorted(STORES)])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    make = STORES.get(request.param, lambda _: f"lmdb://{tmp_path}/store")
    with open_pair(tmp_path, make("t" + new_id())) as found:
        yield found


@pytest.fixture
def apps(tmp_path: Path) -> Iterator[Pair]:
    """Two apps on LMDB."""
    with open_pair(tmp_path, f"lmdb://{tmp_path}/store") as found:
        yield found


def was_given_back(place: Place, job_id: str) -> bool:
    record = place.mill.broker.get(job_id)
    return record is not None and record.error.startswith("no worker knows task")


def test_each_of_two_apps_on_one_queue_runs_its_own_jobs(pair: Pair) -> None:
    # law 7
    # given both workers, and jobs of both apps in turn
    for place in pair:
        place.worker(processes=2, slots=2).wait_ready()
    jobs = [
        place.enqueue(name, n) for n in range(30) for place, name in zip(pair, NAMES, strict=False)
    ]
    # then each job runs once, and no attempt is lost to the other app
    for record in pair[0].finish(jobs):
        assert record.state is State.SUCCEEDED
        assert len(record.attempts) == 1
    for place, name in zip(pair, NAMES, strict=True):
        assert sorted(int(note.split()[1]) for note in place.wait_notes(name, 30)) == [*range(30)]
        assert all(len(runs) == 1 for runs in runs_of(place.ledger()).values())
    # and each worker logs the other task once at most
    for place in pair:
        assert place.workers[0].output.count("no worker knows task") <= 1


NAMES = ("ours", "theirs")


@pytest.mark.everyday("lmdb")
def test_a_job_waits_for_a_worker_that_knows_its_task(pair: Pair) -> None:
    # case T2, law 7
    # given one app's worker, and jobs of the other
    ours, theirs = pair
    first = ours.worker().wait_ready()
    jobs = [theirs.enqueue("theirs", n) for n in range(20)]
    eventually(lambda: all(was_given_back(theirs, job.id) for job in jobs), "giving jobs back")
    # then no attempt was used, and the worker said so once
    record = theirs.mill.broker.get(jobs[0].id)
    assert record is not None
    assert (record.attempt, record.attempts) == (0, [])
    assert first.output.count(f"no worker knows task '{theirs.task('theirs')}'") == 1
    # when a worker comes that knows the task
    theirs.worker().wait_ready()
    for record in theirs.finish(jobs):
        assert record.state is State.SUCCEEDED
        assert len(record.attempts) == 1
    order = [int(note.split()[1]) for note in theirs.wait_notes("theirs", 20)]
    assert sorted(order) == [*range(20)]


def test_an_import_that_fails_waits_for_a_reload(apps: Pair) -> None:
    # given an app that may import a module which is not there
    ours, _ = apps
    ours.write(APP.format(name="ours"), allow_imports=["brought_later.*"])
    worker = ours.worker(slots=1).wait_ready()
    job = ours.mill.enqueue("brought_later.double", 4)
    eventually(lambda: was_given_back(ours, job.id), "giving the job back")
    fine = ours.enqueue("ours")
    assert ours.finish([fine])[0].state is State.SUCCEEDED
    # when it is there, and the worker reloads
    (ours.path / "brought_later.py").write_text("def double(n): return 2 * n\n")
    worker.send(signal.SIGHUP)
    assert job.result(60) == 8


def test_a_kill_loses_no_job_that_is_given_back(apps: Pair) -> None:
    # given a worker that is killed while it gives jobs back
    ours, theirs = apps
    worker = ours.worker().wait_ready()
    jobs = theirs.enqueue_many("theirs", [(n,) for n in range(200)])
    eventually(lambda: any(was_given_back(theirs, job.id) for job in jobs), "giving a job back")
    worker.kill_everything()
    theirs.worker().wait_ready()
    # then all run: those given back, those it held, and those it never saw
    for record in theirs.finish(jobs):
        assert (record.state, record.attempt) == (State.SUCCEEDED, 1)


def test_rabbitmq_alone_hands_the_job_back_with_a_delay(tmp_path: Path) -> None:
    # given a worker that does not know the task
    with open_pair(tmp_path, f"{rabbitmq_url()}?prefix=t{new_id()[-18:]}") as (ours, theirs):
        first = ours.worker().wait_ready()
        theirs.enqueue("theirs", 1)
        first.wait_line("are tried again every 30 s at most until a worker knows it")
        # when another comes, whichever gets the job next
        first.stop()
        theirs.worker().wait_ready()
        theirs.wait_notes("theirs 1")
        assert first.output.count("no worker knows task") == 1
