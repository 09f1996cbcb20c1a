"""``sync=True``: every call is made at once, in the caller, and no store has the job."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tidemill import (
    InvalidOption,
    Job,
    JobContext,
    JobFailed,
    JobNotFound,
    State,
    Tidemill,
    TidemillError,
    this_job,
)
from tidemill.client import inline_jobs

USER: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")


@dataclasses.dataclass
class Point:
    x: int


@pytest.fixture
def mill(tmp_path: Path) -> Tidemill:
    return Tidemill(f"lmdb://{tmp_path}/store", sync=True, allow_imports=["math.*"])


def test_the_call_is_made_in_the_caller(mill: Tidemill, tmp_path: Path) -> None:
    # case T17
    @mill.task(queue="q")
    def where(point: Point) -> tuple[int, int, str]:
        this_job().progress(1, 2, "looking")
        this_job().log("here")
        return threading.get_ident(), point.x, this_job().queue

    job = where.enqueue(Point(3))
    assert job.result() == (threading.get_ident(), 3, "q")
    assert (job.state, job.wait(), job.progress) == (State.SUCCEEDED, State.SUCCEEDED, (1, 2))
    assert job.progress_text == "looking"
    assert [event.what for event in job.trail] == ["created", "started", "log", "succeeded"] or (
        "log" in [event.what for event in job.trail]
    )
    assert not job.cancel()
    assert this_job(None) is None
    with pytest.raises(TidemillError, match=r"^this_job\(\) is called outside of a job"):
        this_job()
    assert mill.enqueue("math.copysign", 2, -2).result() == -2
    assert [job.result() for job in mill.enqueue_many(where.call(Point(n)) for n in range(2))]
    assert not (tmp_path / "store").exists()


def test_a_failing_task_raises_in_the_caller(mill: Tidemill) -> None:
    # case T17
    @mill.task
    def fail() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fail.enqueue()
    with pytest.raises(TypeError):
        fail.enqueue(1)  # type: ignore[call-arg]
    with pytest.raises(InvalidOption):
        mill.enqueue("os.getpid")


def test_jobs_are_kept_for_the_life_of_the_process(mill: Tidemill, tmp_path: Path) -> None:
    @mill.task(queue="mail", tags=["letter"])
    def halve(number: int) -> int:
        job = this_job()
        job.progress(1, 2)
        job.log("halved")
        if number % 2:
            raise ValueError("odd")
        return number // 2

    done = halve.enqueue(4)
    with pytest.raises(ValueError, match="odd"):
        halve.enqueue(3)

    # then the job is found by its id
    again = mill.job(done.id)
    assert (again.state, again.wait(), again.result(), again.progress) == (
        *(State.SUCCEEDED, State.SUCCEEDED, 2, (1, 2)),
    )
    assert asyncio.run(again.aresult()) == 2
    # and a search finds both, the newest first
    found = list(mill.jobs(queue="mail"))
    assert [job.state for job in found] == [State.FAILED, State.SUCCEEDED]
    assert [job.id for job in mill.jobs(tag="letter", state="succeeded")] == [done.id]
    failed = found[0].refresh()
    assert (failed.error, failed.attempts[0].error) == ("ValueError: odd", "ValueError: odd")
    assert "raise ValueError" in failed.attempts[0].traceback
    with pytest.raises(JobFailed, match="ValueError: odd"):
        mill.job(found[0].id).result()
    # and nothing can be done with a job but to delete the job
    assert (again.cancel(), found[0].retry(), again.delete(), again.delete()) == (
        *(False, False, True, False),
    )
    with pytest.raises(JobNotFound, match="last 10,000 jobs that ran in this process"):
        mill.job(done.id).wait()
    assert not (tmp_path / "store").exists()


def test_the_oldest_jobs_go_first(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_jobs, "KEPT_MOST", 3)

    @mill.task
    def nothing() -> None: ...

    jobs = mill.enqueue_many([nothing.call()] * 5)
    assert [job.id for job in mill.jobs()] == [job.id for job in reversed(jobs[2:])]
    page = mill.jobs().page(limit=2)
    assert [r.envelope.id for r in page.records] == [jobs[4].id, jobs[3].id]
    last = mill.jobs().page(limit=2, cursor=page.cursor)
    assert ([r.envelope.id for r in last.records], last.cursor) == ([jobs[2].id], "")
    assert jobs[0].state is State.SUCCEEDED  # its handle still has its record


def test_async_tasks_inside_and_outside_of_a_loop(mill: Tidemill) -> None:
    # case T17, T19
    @mill.task
    async def who() -> tuple[str, str]:
        await asyncio.sleep(0)
        job = this_job(None)
        return USER.get(), job.id if job else ""

    job = who.enqueue()
    assert job.result() == ("nobody", job.id)

    async def main() -> Job[tuple[str, str]]:
        USER.set("ann")
        return await who.aenqueue()

    job = asyncio.run(main())
    assert job.result() == ("ann", job.id)


def test_an_app_is_switched_for_the_length_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    # given an app as a module has it
    mill = Tidemill("memory://")
    done: list[int] = []

    @mill.task
    def note(n: int) -> int:
        done.append(n)
        return n

    # when a test switches it, then calls are made at once and nothing is stored
    with monkeypatch.context() as patch:
        patch.setattr(mill, "sync", True)
        assert note.using(delay=60).enqueue(1).result() == 1
        assert [job.result() for job in mill.enqueue_many(note.call(n) for n in (2, 3))] == [2, 3]
    assert done == [1, 2, 3]
    assert mill.jobs().page().records == []
    # and afterwards it is as it was
    assert note.enqueue(4).state == "ready"
    assert done == [1, 2, 3]


def test_mock_restores_sync_and_the_middleware() -> None:
    def layer(call_next: Callable[[], Any], _: JobContext) -> Any:
        return call_next()

    mill = Tidemill("memory://", sync=True)
    mill.around(layer)
    with mock.patch.object(mill, "sync", False), mock.patch.object(mill, "middleware", ()):
        assert (mill.sync, mill.middleware) == (False, ())
    assert (mill.sync, mill.middleware) == (True, (layer,))
