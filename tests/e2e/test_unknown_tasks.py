"""Two apps on one store: a job waits for a worker whose app has its task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Place, eventually, open_place
from servers import rabbitmq_url

from tidemill.core.clock import new_id
from tidemill.core.job import State

APP = """
@mill.task
def {name}(n=0): begin(); note("{name}", n); end()
"""

Pair = tuple[Place, Place]


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


def was_given_back(place: Place, job_id: str) -> bool:
    record = place.mill.broker.get(job_id)
    return record is not None and record.error.startswith("no worker knows task")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with open_pair(tmp_path, f"lmdb://{tmp_path}/store") as found:
        yield found


@pytest.mark.everyday
def test_a_job_waits_for_a_worker_that_knows_its_task(pair: Pair) -> None:
    # case T2, law 7
    # given one app's worker, and jobs of the other
    ours, theirs = pair
    first = ours.worker().wait_ready()
    jobs = [theirs.enqueue("theirs", n) for n in range(20)]
    eventually(lambda: all(was_given_back(theirs, job.id) for job in jobs), "giving jobs back")
    # then no attempt was used, and the worker said so once
    record = theirs.mill.broker.get(jobs[0].id)
    assert (record.attempt, record.attempts) == (0, [])
    assert first.output.count(f"no worker knows task '{theirs.task('theirs')}'") == 1
    # when a worker comes that knows the task
    theirs.worker().wait_ready()
    for record in theirs.finish(jobs):
        assert record.state is State.SUCCEEDED
        assert len(record.attempts) == 1
    order = [int(note.split()[1]) for note in theirs.wait_notes("theirs", 20)]
    assert sorted(order) == [*range(20)]


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
