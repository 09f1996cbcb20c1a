"""``sync=True``: every call is made at once, in the caller, and nothing is stored."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill import InvalidOption, Job, JobContext, State, Tidemill, current_job

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
        job = current_job()
        assert job is not None
        job.progress(1, 2)
        job.log("here")
        return threading.get_ident(), point.x, job.queue

    job = where.enqueue(Point(3))
    assert job.result() == (threading.get_ident(), 3, "q")
    assert (job.state, job.wait(), job.progress) == (State.SUCCEEDED, State.SUCCEEDED, (1, 2))
    assert [event.what for event in job.trail] == ["created", "started", "log", "succeeded"] or (
        "log" in [event.what for event in job.trail]
    )
    assert not job.cancel()
    assert current_job() is None
    assert mill.enqueue("math.copysign", 2, -2).result() == -2
    assert [job.result() for job in mill.enqueue_many(where.call(Point(n)) for n in range(2))]
    assert not (tmp_path / "store").exists()


def test_it_raises_in_the_caller(mill: Tidemill) -> None:
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


def test_async_tasks_inside_and_outside_of_a_loop(mill: Tidemill) -> None:
    # case T17, T19
    @mill.task
    async def who() -> tuple[str, str]:
        await asyncio.sleep(0)
        job = current_job()
        return USER.get(), job.id if job else ""

    job = who.enqueue()
    assert job.result() == ("nobody", job.id)

    async def main() -> Job[tuple[str, str]]:
        USER.set("ann")
        return await who.aenqueue()

    job = asyncio.run(main())
    assert job.result() == ("ann", job.id)


def test_middleware_sync_and_async(tmp_path: Path) -> None:
    calls: list[str] = []

    def plain(call_next: Callable[[], Any], context: JobContext) -> Any:
        calls.append("plain")
        return call_next()

    async def patient(call_next: Callable[[], Any], context: JobContext) -> Any:
        calls.append("patient")
        return await call_next()

    mill = Tidemill("memory://", sync=True, middleware=[plain, patient])

    @mill.task
    async def work() -> int:
        return 5

    assert work.enqueue().result() == 5
    assert calls == ["plain", "patient"]


def test_the_codec_is_the_same_as_for_a_worker(mill: Tidemill) -> None:
    @mill.task
    def take(value: Any) -> Any:
        return value

    assert take.enqueue({"a": (1,)}).result() == {"a": (1,)}
    with pytest.raises(Exception, match="cannot encode"):
        take.enqueue(object())


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
    assert mill.find().records == []
    # and afterwards it is as it was
    assert note.enqueue(4).state == "ready"
    assert done == [1, 2, 3]
