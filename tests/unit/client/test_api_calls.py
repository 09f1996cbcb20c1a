"""Enqueueing: one by one, many, in a batch, from asyncio; and the handles of the jobs."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from harness import eventually

from tidemill import (
    DuplicateJob,
    InvalidOption,
    Job,
    JobCancelled,
    JobNotFound,
    ResultTimeout,
    State,
    Task,
    Tidemill,
    TidemillError,
)
from tidemill.errors import JobPruned
from tidemill.testing import run_all


@pytest.fixture
def double(mill: Tidemill) -> Task[[int], int]:
    @mill.task(queue="numbers")
    def double(number: int) -> int:
        return 2 * number

    return double


def ready(mill: Tidemill) -> int:
    return sum(stats.ready for stats in mill.queues())


def test_a_task_can_be_called_as_ever(double: Task[[int], int]) -> None:
    assert double(4) == 8
    assert double.using(delay=5)(4) == 8
    assert double.__name__ == "double"


def test_a_call_tells_its_id_and_options(double: Task[[int], int]) -> None:
    call = double.using(delay=5).call(4)
    assert (call.id, call.options.queue, call.options.delay) == ("", "numbers", 5.0)
    named = call.using(id="mine")
    assert (named.id, named.options.id, call.id) == ("mine", "mine", "")


def test_enqueue_gives_a_handle(mill: Tidemill, double: Task[[int], int]) -> None:
    # given
    job = double.enqueue(4)
    # then
    assert (job.state, job.placed, job.attempts, job.error) == (State.READY, "created", [], "")
    assert job.progress is None
    assert [event.what for event in job.trail] == ["created"]
    assert job.record.envelope.queue == "numbers"
    assert job.record.envelope.text == "4"
    same = mill.job(job.id)
    assert same == job
    assert hash(same) == hash(job)
    assert job.id in repr(job)
    # when
    run_all(mill)
    # then
    assert (job.result(), job.state) == (8, State.SUCCEEDED)
    [attempt] = job.attempts
    assert (attempt.number, attempt.worker, attempt.error) == (1, "testing", "")
    assert 0 < attempt.started <= attempt.ended
    assert not job.cancel()


def test_using_changes_one_call(mill: Tidemill, double: Task[[int], int]) -> None:
    later = double.using(delay=1800, priority=5, tags=["t"], headers={"h": "1"}, id="mine")
    job = later.enqueue(4)
    record = job.refresh()
    assert (job.id, record.state) == ("mine", State.SCHEDULED)
    assert (record.envelope.tags, record.envelope.headers) == (("t",), {"h": "1"})
    assert abs(record.due - time.time() - 1800) < 60
    with pytest.raises(DuplicateJob):  # case Q13
        later.enqueue(5)
    assert double.enqueue(4).state is State.READY
    assert job.retry()  # a scheduled job is made ready
    assert job.state is State.READY


def test_enqueue_many_is_one_step_in_order(mill: Tidemill, double: Task[[int], int]) -> None:
    jobs = mill.enqueue_many(double.call(number) for number in range(50))
    assert [job.record.envelope.text for job in jobs] == [str(n) for n in range(50)]
    assert [job.record.seq for job in jobs] == sorted(job.record.seq for job in jobs)
    calls = [double.using(id="a").call(1), double.using(id="b").call(2).using(id="a")]
    with pytest.raises(DuplicateJob):
        mill.enqueue_many(calls)
    assert ready(mill) == 50  # all or none
    assert mill.enqueue_many([]) == []
    with pytest.raises(InvalidOption, match="txn must be the same"):
        mill.enqueue_many([double.using(txn=object()).call(1), double.call(2)])


def test_a_key_may_be_a_function_of_the_arguments(mill: Tidemill) -> None:
    @mill.task(key=lambda number, **_: f"n:{number}")
    def keyed(number: int, *, color: str = "") -> None: ...

    first = keyed.enqueue(1, color="red")
    assert first.record.envelope.key == "n:1"
    assert keyed.enqueue(1).placed == "kept"
    assert keyed.enqueue(1) == first
    assert keyed.enqueue(2) != first
    with pytest.raises(InvalidOption, match=r"^key must not be empty"):
        keyed.using(key=lambda *_, **__: "").enqueue(3)


# -- batches --------------------------------------------------------------------------------------


def test_a_batch_is_stored_at_its_end(mill: Tidemill, double: Task[[int], int]) -> None:
    with mill.batch():
        job = double.enqueue(1)
        mill.enqueue_many([double.call(2)])
        mill.queue("raw").put("message")
        assert ready(mill) == 0
        for wait in (job.wait, job.result, mill.job("other").wait):
            with pytest.raises(TidemillError, match="cannot wait inside a batch"):
                wait(1)
        with pytest.raises(TidemillError, match="not stored until the batch ends"):
            _ = job.state
        with pytest.raises(InvalidOption, match="txn inside a batch"):
            double.using(txn=object()).enqueue(1)
    assert ready(mill) == 3
    assert (job.state, job.placed) == (State.READY, "created")


def test_an_exception_inside_stores_nothing(mill: Tidemill, double: Task[[int], int]) -> None:
    with pytest.raises(ZeroDivisionError), mill.batch():
        double.enqueue(1 // 0)
    with pytest.raises(DuplicateJob), mill.batch():
        mill.enqueue_many(double.using(id="same").call(n) for n in range(2))
    assert ready(mill) == 0
    assert not mill.runtime.in_batch()


def test_batches_do_not_nest(mill: Tidemill, double: Task[[int], int]) -> None:
    batch = mill.batch()
    with batch:
        with pytest.raises(TidemillError, match="batch inside a batch"), mill.batch():
            pass
        double.enqueue(1)
    assert ready(mill) == 1
    with pytest.raises(TidemillError, match="this batch has ended"), batch:
        pass


def test_a_batch_is_of_its_thread(mill: Tidemill, double: Task[[int], int]) -> None:
    with mill.batch():
        thread = threading.Thread(target=double.enqueue, args=(1,))
        thread.start()
        thread.join()
        assert ready(mill) == 1


def test_a_handle_from_a_batch_follows_its_key(mill: Tidemill, double: Task[[int], int]) -> None:
    kept = double.using(key="k").enqueue(1)
    with mill.batch():
        job = double.using(key="k").enqueue(2)
    assert (job, job.placed) == (kept, "kept")


def test_a_put_that_outlives_its_batch_is_not_lost(
    mill: Tidemill, double: Task[[int], int]
) -> None:
    async def main() -> Job[int]:
        go = asyncio.Event()

        async def late() -> Job[int]:
            await go.wait()
            await double.aenqueue(3)
            return double.enqueue(2)

        async with mill.batch():
            await double.aenqueue(1)
            task = asyncio.create_task(late())
            await asyncio.sleep(0)
        assert ready(mill) == 1
        go.set()
        return await task

    assert asyncio.run(main()).state is State.READY
    assert ready(mill) == 3


# -- asyncio --------------------------------------------------------------------------------------


def test_async_twins(mill: Tidemill, double: Task[[int], int]) -> None:
    async def main() -> None:
        jobs = await asyncio.gather(*(double.using(key=f"k{n}").aenqueue(n) for n in range(200)))
        assert len(set(jobs)) == 200
        assert ready(mill) == 200
        assert len(await mill.aenqueue_many(double.call(n) for n in range(3))) == 3
        with pytest.raises(DuplicateJob):  # and only who is to blame is told
            await asyncio.gather(*(double.using(id="x").aenqueue(n) for n in range(2)))
        job = jobs[0]
        assert await job.astate() is State.READY
        assert (await job.arefresh()).attempt == 0
        assert (await job.aprogress(), await job.aerror()) == (None, "")
        with pytest.raises(ResultTimeout):
            await job.aresult(timeout=0.01)
        assert await job.acancel()
        assert await job.await_end(timeout=5) is State.CANCELLED
        with pytest.raises(JobCancelled):
            await job
        assert await job.aretry()
        assert await job.astate() is State.READY
        assert await job.adelete()
        with pytest.raises(JobPruned):
            await job.arefresh()

    asyncio.run(main())


def test_a_wait_that_is_given_up_does_not_keep_its_thread(
    mill: Tidemill, double: Task[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.client.job_handle.FIRST_POLL", 0.05)
    monkeypatch.setattr("tidemill.client.job_handle.LONGEST_POLL", 0.05)
    job = double.enqueue(1)
    before = {*threading.enumerate()}  # a thread of an earlier test may be about to end

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(job.aresult(), 0.3)
        with pytest.raises(ResultTimeout, match=r"is still \w+ after 0.2 s"):
            await job.aresult(0.2)

    asyncio.run(main())
    mill.close()
    eventually(
        lambda: (
            not [
                thread
                for thread in {*threading.enumerate()} - before
                if thread.name.startswith("tidemill")
            ]
        ),
        "the threads end",
    )


# -- waiting for what is not there ----------------------------------------------------------------


def test_unknown_and_no_longer_kept_are_told_apart(make_mill: Any) -> None:
    # case T16
    mill = make_mill()

    @mill.task(result_ttl=0)
    def brief() -> None: ...

    for look in (lambda job: job.state, lambda job: job.result(1), lambda job: job.refresh()):
        with pytest.raises(JobNotFound, match="no job has the id 'never'") as caught:
            look(mill.job("never"))
        assert caught.type is JobNotFound
    with pytest.raises(JobNotFound, match=r"whole id; to find it: tidemill job fc4351b7$"):
        mill.job("fc4351b7").wait()
    job = brief.enqueue()
    job.delete()
    with pytest.raises(JobPruned, match="no longer kept"):
        mill.job(job.id).result(1)
    with pytest.raises(InvalidOption, match=r"^id "):
        mill.job("")
    assert not job.delete()
    assert not job.cancel()
    assert not job.retry()


def test_the_app_can_be_closed_and_used_again(make_mill: Any) -> None:
    with make_mill() as mill:
        mill.queue("q").put(1)
    mill.close()
    assert mill.url
    mill.queue("q").put(2)
    assert mill.queue("q").get(timeout=5).body in (1, 2)  # memory has forgotten the first
