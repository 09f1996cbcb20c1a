"""Jobs run by a worker in this process: what they are given, what they return, how they fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import gc
import os
import pathlib
import threading
from typing import Any, NamedTuple

import msgspec
import pytest
from harness import eventually
from http_desk import HttpOwner

from tidemill import (
    Fail,
    JobCancelled,
    JobFailed,
    ResultTimeout,
    Retries,
    Retry,
    State,
    Tidemill,
    TidemillError,
    this_job,
)
from tidemill.brokers.contract.exchange import Want
from tidemill.core.codec import MAX_RESULT, pack
from tidemill.core.job import Outcome, Verdict
from tidemill.errors import JobExpired
from tidemill.testing import run_all, worker


class Color(enum.Enum):
    RED = "r"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
    color: Color = Color.RED


class Box(msgspec.Struct):
    name: str
    corners: list[Point] = []


class Pair(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass
class Account:
    """Its method is a task; the instance travels along."""

    owner: str

    def pay(self, amount: int) -> str:
        return f"{self.owner} {amount}"


def test_typed_arguments_become_themselves_again(mill: Tidemill) -> None:
    # case T1
    got: list[Any] = []

    @mill.task
    def take(
        point: Point, box: Box, color: Color, path: pathlib.Path, pair: Pair,
        *more: Point, maybe: Point | None = None, **rest: Color,
    ) -> None:  # fmt: skip
        got.extend([point, box, color, path, pair, more, maybe, rest])

    given = (Point(1, 2), Box("b", [Point(3)]), Color.RED, pathlib.Path("/tmp/ä"), Pair(1, 2))
    job = take.enqueue(*given, Point(5), maybe=Point(6), odd=Color.RED)
    bare = take.enqueue(*given, maybe=None)
    run_all(mill, concurrency=1)
    assert (job.error, bare.error) == ("", "")
    assert got == [*given, (Point(5),), Point(6), {"odd": Color.RED}, *given, (), None, {}]


def test_an_argument_that_is_not_what_the_annotation_says(mill: Tidemill) -> None:
    @mill.task
    def take(point: Point) -> None: ...

    job = take.enqueue({"x": "many"})  # type: ignore[arg-type]
    run_all(mill)
    with pytest.raises(JobFailed, match=r"argument point: .*int"):
        job.result()
    assert len(job.attempts) == 1  # at once: trying again would not help


def test_a_method_carries_its_instance(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    # case T1
    monkeypatch.setattr(Account, "pay", mill.task(Account.pay))
    account: Any = Account("ann")
    assert account.pay(5) == "ann 5"
    jobs = [account.pay.enqueue(6), account.pay.using(priority=1).enqueue(amount=7)]
    run_all(mill)
    assert [job.result() for job in jobs] == ["ann 6", "ann 7"]
    with pytest.raises(TypeError):
        account.pay.enqueue()


@pytest.mark.parametrize(
    "value",
    [
        *([], 0, "", None, False, {}, b"", ()),  # falsy is not "no result yet": case T1
        *(2**70, 1.5, (1, (2,)), {1, 2}, decimal.Decimal("0.10"), {"a": [None]}),
        *(dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.timedelta(days=1)),
    ],
    ids=repr,
)
def test_results_keep_their_type(value: Any) -> None:
    mill = Tidemill("memory://")

    @mill.task
    def give(value: Any) -> Any:
        return value

    @mill.task
    async def agive(value: Any) -> Any:
        return value

    jobs = [give.enqueue(value), agive.enqueue(value)]
    with pytest.raises(ResultTimeout):
        jobs[0].result(timeout=0)
    run_all(mill)
    for job in jobs:
        result = job.result(timeout=0)
        assert result == value
        assert type(result) is type(value)
    mill.close()


def test_an_importable_callable_runs_once_allowed(make_mill: Any) -> None:
    # case T1, case S2
    mill = make_mill(allow_imports=["math.*", "os.path.*", "tidemill.*"])
    good = mill.enqueue("math.copysign", 2, -2)
    path = mill.enqueue("os.path.join", "a", "b")
    sly = [mill.enqueue(p, "x") for p in ("tidemill.app.os.getenv", "math.copysign.__class__")]
    with worker(mill):
        assert good.result(timeout=30) == -2.0
        assert path.result(timeout=30) == "a/b"
        for job in sly:  # a module that a module imports is no part of it
            with pytest.raises(ResultTimeout):
                job.result(timeout=0.1)
    assert not any(job.attempts for job in sly)


def test_three_ways_to_have_no_result_are_three_errors(mill: Tidemill) -> None:
    # case T16
    go = threading.Event()

    @mill.task(retries=0)
    def fail() -> None:
        raise ValueError("no good")

    @mill.task(retries=0)
    def slow() -> str:
        go.wait(30)
        return "done"

    late = slow.using(expires=0.001).enqueue()
    gone = slow.enqueue()
    gone.cancel()
    threading.Event().wait(0.01)
    with worker(mill):
        with pytest.raises(JobFailed, match="ValueError: no good") as caught:
            fail.enqueue().result(timeout=30)
        assert caught.value.error == "ValueError: no good"
        assert 'raise ValueError("no good")' in caught.value.traceback
        assert "tidemill/worker" not in caught.value.traceback
        running = slow.enqueue()
        with pytest.raises(ResultTimeout, match=r"is still \w+ after 0.05 s"):
            running.result(timeout=0.05)
        with pytest.raises(TimeoutError):
            running.wait(timeout=0)
        go.set()
        assert running.result(timeout=30) == "done"
    with pytest.raises(JobExpired):
        late.result(timeout=0)
    with pytest.raises(JobCancelled):
        gone.result(timeout=0)


def test_awaiting_results(mill: Tidemill) -> None:
    # case T16
    @mill.task(retries=0)
    def half(number: int) -> int:
        if number % 2:
            raise ValueError(number)
        return number // 2

    async def main() -> None:
        jobs = [await half.aenqueue(n) for n in range(20)]
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert results[0::2] == list(range(10))
        assert all(isinstance(error, JobFailed) for error in results[1::2])
        assert await (await half.aenqueue(8)) == 4

    with worker(mill):
        asyncio.run(main())


def test_retries_and_what_a_task_can_raise(mill: Tidemill) -> None:
    # case T3, T4
    runs: list[tuple[str, int]] = []

    @mill.task(retries=Retries(2, delay=0))
    def work(how: str) -> None:
        context = this_job()
        runs.append((how, context.attempt))
        if how == "fail":
            raise Fail("enough")
        if how == "retry" and context.attempt == 1:
            raise Retry("not yet", delay=0)
        if how == "raise":
            raise KeyError(how)

    always, retried, failed = (work.enqueue(how) for how in ("raise", "retry", "fail"))
    once = work.using(retries=0).enqueue("raise")  # the call's option over the task's
    with worker(mill):
        assert [job.wait(30) for job in (always, retried, failed, once)] == [
            *(State.FAILED, State.SUCCEEDED, State.FAILED, State.FAILED)
        ]
    assert [a.number for a in always.attempts] == [1, 2, 3]
    assert all("KeyError" in a.error and a.traceback for a in always.attempts)
    assert [a.error for a in retried.attempts] == ["Retry: not yet", ""]
    assert len(failed.attempts) == len(once.attempts) == 1
    assert always.error == "KeyError: 'raise'"
    # when a human asks for it again, it has all its attempts anew
    assert always.retry()
    run_all(mill)
    assert always.state is State.FAILED
    assert runs.count(("raise", 1)) == 3  # of ``once``, and of both runs of ``always``
    assert [(a.run, a.number) for a in always.attempts[-3:]] == [(2, 1), (2, 2), (2, 3)]


def test_progress_and_log_are_seen_outside(mill: Tidemill) -> None:
    said, go = threading.Event(), threading.Event()

    @mill.task
    def work() -> None:
        job = this_job()
        job.progress(3, 10)
        job.log("a line")
        said.set()
        go.wait(60)

    with worker(mill):
        job = work.enqueue()
        assert said.wait(30)
        # a note travels without anybody waiting for it
        eventually(lambda: job.refresh().progress, "progress")
        assert str(job.progress) == "(3, 10)"
        go.set()
        job.wait(30)
    events = [(event.what, event.detail) for event in job.trail]
    assert ("log", "a line") in events
    assert events[0][0] == "created"
    assert events[-1][0] == "succeeded"


def test_signed_jobs(make_mill: Any) -> None:
    # case T15
    old, new = make_mill(secret_keys=["old"]), make_mill(secret_keys=["new", b"old"])
    for mill in (old, new):
        mill.task(name="id")(lambda_free)
    rotated, mine = old.enqueue("id", 1), new.enqueue("id", 2)
    if new.url == old.url != "memory://":
        run_all(new)
        assert rotated.result(0) == 1
        foreign = new.enqueue("id", 3)
        run_all(old)
        with pytest.raises(JobFailed, match="bad signature"):
            foreign.result(0)
    else:
        run_all(new)
    assert mine.result(0) == 2


def test_a_copy_of_a_signed_job_can_be_put_again(make_mill: Any) -> None:
    # case S3: what the signature does not cover
    mill, ran = make_mill(secret_keys=["k"]), list[int]()
    task = mill.task(name="note")(ran.append)
    job = mill.enqueue(task.call(1))
    mill.schedules.add("s", task.call(2), every=60)
    fired = mill.schedules.run("s")
    run_all(mill, concurrency=1)
    copies = [one.refresh().envelope for one in (job, fired)]
    # given a deleted job and a removed schedule
    mill.schedules.remove("s")
    mill.broker.delete([copy.id for copy in copies])
    # when somebody without the key puts the copies into the store
    mill.broker.put(copies)
    run_all(mill, concurrency=1)
    # then they run again, until the key is removed
    assert ran == [1, 2, 1, 2]
    mill.runtime.keys[:] = [b"new"]
    mill.broker.delete([copy.id for copy in copies])
    mill.broker.put(copies)
    run_all(mill, concurrency=1)
    assert ran == [1, 2, 1, 2]


def test_a_client_reads_a_result_that_nobody_signed(make_mill: Any) -> None:
    # case S4: what the signature does not cover
    mill = make_mill(secret_keys=["k"])
    job = mill.enqueue(mill.task(name="id")(lambda_free).call(1))
    owner = HttpOwner(mill.broker)
    [lease] = owner.exchange(want=Want(1)).leases
    owner.exchange(verdicts=[Verdict(lease.token, Outcome.SUCCESS, pack("forged"))])
    assert job.result(0) == "forged"


def lambda_free(value: Any) -> Any:
    return value


class Opaque:
    """Plain data has no room for it."""

    def __init__(self, value: int) -> None:
        self.value = value


def test_pickle_where_asked_for(make_mill: Any) -> None:
    mill = make_mill(secret_keys=["k"], serializer="pickle")
    task = mill.task(lambda_free)

    @mill.task
    def look(thing: Opaque) -> int:
        return thing.value

    jobs = [look.enqueue(Opaque(7)), task.enqueue((1, 2))]
    run_all(mill)
    assert [job.result(0) for job in jobs] == [7, (1, 2)]
    mill.queue("things").put(Opaque(8))
    assert mill.queue("things").get(5).body.value == 8


def test_values_that_cannot_travel(mill: Tidemill) -> None:
    # case T20
    @mill.task
    def give() -> Any:
        return Opaque(1)

    with pytest.raises(TidemillError, match="Opaque"):
        mill.task(lambda_free).enqueue(Opaque(1))
    job = give.enqueue()
    run_all(mill)
    with pytest.raises(JobFailed, match=r"result cannot be kept.*Opaque"):
        job.result(0)


def test_a_result_above_the_maximum_fails_its_job_alone(mill: Tidemill) -> None:
    # law 15
    @mill.task
    def give(size: int) -> bytes:
        return b"x" * size

    largest = MAX_RESULT - 5  # the head of bytes takes five
    kept, refused = give.enqueue(largest), give.enqueue(largest + 1)
    run_all(mill)
    assert len(kept.result(0)) == largest
    with pytest.raises(JobFailed, match=r"has 15,728,641 bytes, and a result may have 15,728,640"):
        refused.result(0)


# -- the worker in this process -------------------------------------------------------------------


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/dev/fd"))


def left_of_workers(others: set[threading.Thread]) -> list[str]:
    """The names of the threads of workers, besides the others."""
    names = [thread.name for thread in threading.enumerate() if thread not in others]
    names = [name for name in names if name != "tidemill-writer"]  # of the open store
    return [name for name in names if name.startswith(("tide", "asyncio"))]


@pytest.mark.everyday
def test_the_worker_leaves_nothing_behind(mill: Tidemill) -> None:
    @mill.task
    async def asleep() -> None:
        await asyncio.to_thread(lambda_free, 1)

    task = mill.task(lambda_free)
    others = set(threading.enumerate())  # of servers that other tests of this process use, too
    files = list[int]()
    for _ in range(10):
        with worker(mill, concurrency=3):
            jobs = [task.enqueue(1), asleep.enqueue(), task.enqueue(2)]
            assert [job.wait(30) for job in jobs] == [State.SUCCEEDED] * 3
        # a worker waits only a second for each thread to end
        eventually(lambda: not left_of_workers(others), "the end of all threads")
        files.append(open_files())
    # the store may keep places of waits for the next waits; a leak would grow with each turn
    assert files[-1] - files[0] < 9, files


def test_the_fixture(tidemill_worker: Any, mill: Tidemill) -> None:
    task = mill.task(lambda_free)
    tidemill_worker(mill)
    assert task.enqueue(5).result(timeout=30) == 5


def test_an_error_that_ends_the_worker_is_raised(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the store is on fire")

    supervisors = contextlib.ExitStack()
    supervisor = supervisors.enter_context(worker(mill))
    monkeypatch.setattr(mill.broker, "exchange", broken)
    mill.broker.wake(supervisor.owner.id)
    with pytest.raises(RuntimeError, match="on fire"):
        supervisors.close()
    monkeypatch.undo()
    run_all(mill)


def test_a_record_has_the_decoded_result_and_the_latest_error(mill: Tidemill) -> None:
    @mill.task(retries=0)
    def halve(number: int) -> tuple[int, None]:
        job = this_job()
        job.progress(1, 2)
        job.log("halved")
        if number % 2:
            raise ValueError("odd")
        return number // 2, None

    @mill.task
    def nothing() -> None: ...

    jobs = [halve.enqueue(4), halve.enqueue(3), nothing.enqueue()]
    assert jobs[0].refresh().result is None
    run_all(mill)

    even, odd, none = (job.refresh() for job in jobs)
    assert (even.state, even.result, even.latest_error) == (State.SUCCEEDED, (2, None), "")
    assert (odd.state, odd.result, odd.latest_error) == (State.FAILED, None, "ValueError: odd")
    assert (none.state, none.result, none.raw_result) == (State.SUCCEEDED, None, b"")
    assert (even.progress, [line for _, line in even.log]) == ((1, 2), ["halved"])
    assert asyncio.run(jobs[1].aerror()) == "ValueError: odd"
    assert asyncio.run(jobs[0].aprogress()) == (1, 2)
