"""A handle shows the job as the store has it now, judged by the store's clock."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest
from servers import STORES, new_store

from tidemill import JobNotFound, Tidemill, as_completed
from tidemill.core.job import State
from tidemill.errors import JobExpired, JobPruned
from tidemill.testing import run_all

pytestmark = pytest.mark.everyday


@pytest.fixture(params=STORES)
def mill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tidemill]:
    with Tidemill(new_store(request.param, tmp_path), retries=0) as mill:
        yield mill


@pytest.fixture
def task(mill: Tidemill) -> Callable[..., object]:
    @mill.task(name="task")
    def task(good: bool = True) -> int:
        if not good:
            raise ValueError("bad")
        return 1

    return task


def test_a_job_expires_for_all_who_look_while_no_worker_lives(mill: Tidemill, task) -> None:
    # case M7
    ways = {
        "state": lambda job: job.state is State.EXPIRED,
        "refresh": lambda job: job.refresh().state is State.EXPIRED,
        "result": lambda job: _raises(JobExpired, lambda: job.result(timeout=0)),
        "wait": lambda job: job.wait(timeout=0) is State.EXPIRED,
        "aresult": lambda job: _raises(JobExpired, lambda: asyncio.run(job.aresult(timeout=0))),
        "jobs": lambda job: [each.id for each in mill.jobs(state="expired")] == [job.id],
        "no job": lambda job: not list(mill.jobs(state="ready")),
        "page": lambda job: mill.jobs().page().records[0].state is State.EXPIRED,
        "queues": lambda job: {row.name: row.ready for row in mill.queues()}["queues"] == 0,
    }
    for name, seen in ways.items():
        job = task.using(expires=0.05, queue=name.replace(" ", "")).enqueue()
        time.sleep(0.1)
        assert seen(job), name
        assert job.state is State.EXPIRED  # every look sees the same
        job.delete()


def test_a_delayed_job_is_ready_in_time_for_all_who_look(mill: Tidemill, task) -> None:
    # case M7
    first, second = (task.using(delay=0.05).enqueue() for _ in range(2))
    time.sleep(0.1)
    assert first.state is State.READY
    assert {job.id for job in mill.jobs(state="ready")} == {first.id, second.id}


def test_a_handle_that_has_seen_an_end_reads_anew(mill: Tidemill, task) -> None:
    # case M7
    job = task.enqueue(good=False)
    run_all(mill)
    assert job.wait(0) is State.FAILED
    assert (job.state, job.error) == (State.FAILED, "ValueError: bad")
    # when another handle, as of another process, retries the job
    assert mill.job(job.id).retry()
    assert job.state is State.READY
    with pytest.raises(TimeoutError):
        job.result(timeout=0)
    run_all(mill)
    assert job.state is State.FAILED
    assert mill.job(job.id).delete()
    for look in (lambda: job.state, lambda: job.result(timeout=0), lambda: job.result(timeout=1)):
        with pytest.raises(JobPruned):
            look()
    assert job.wait(0) is State.SUCCEEDED  # the guide says so


def test_records_of_a_search_are_not_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Tidemill(new_store("lmdb", tmp_path)) as mill:

        @mill.task
        def one() -> int:
            return 1

        jobs = [one.enqueue() for _ in range(3)]
        run_all(mill)
        found = [*mill.jobs()]
        assert [job.result() for job in found] == [1, 1, 1]  # a search reads no results  # case M10
        found = [*mill.jobs()]
        monkeypatch.setattr(mill.broker, "get", None)
        assert [(job.state, len(job.attempts), job.error) for job in found] == [
            (State.SUCCEEDED, 1, "")
        ] * 3
        assert [job.result() for job in as_completed(jobs)] == [1, 1, 1]


def test_only_what_was_kept_once_is_pruned(mill: Tidemill, task) -> None:  # case M7
    with contextlib.suppress(ZeroDivisionError), mill.batch():
        job = task.enqueue()
        raise ZeroDivisionError
    for look in (lambda: job.state, lambda: job.result(timeout=0), lambda: job.wait(1)):
        with pytest.raises(JobNotFound, match="rolled back") as caught:
            look()
        assert type(caught.value) is JobNotFound
    with mill.batch():
        kept = task.enqueue()
    assert kept.state is State.READY
    assert kept.delete()
    with pytest.raises(JobPruned):
        _ = kept.state


def test_a_job_of_an_open_transaction_is_not_found(tmp_path: Path) -> None:  # case M7
    env = lmdb.open(str(tmp_path / "own"), max_dbs=20, map_size=1 << 28)
    with Tidemill(env=env) as mill:

        @mill.task
        def one() -> int:
            return 1

        with contextlib.suppress(ZeroDivisionError), env.begin(write=True) as txn:
            lost = one.using(txn=txn).enqueue()
            with pytest.raises(JobNotFound, match="not been committed"):
                _ = lost.state
            raise ZeroDivisionError
        with pytest.raises(JobNotFound, match="rolled back") as caught:
            _ = lost.state
        assert type(caught.value) is JobNotFound
        with env.begin(write=True) as txn:
            kept = one.using(txn=txn).enqueue()
        assert kept.state is State.READY
        kept.delete()
        with pytest.raises(JobPruned):
            _ = kept.state
    env.close()


def _raises(kind: type[Exception], look: Callable[[], object]) -> bool:
    with pytest.raises(kind):
        look()
    return True
