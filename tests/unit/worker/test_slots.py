"""Slots: which job gets one, which thread runs it, which thread reads on; and the prefetch."""

from types import SimpleNamespace
from typing import Any

from tidemill.core.job import Outcome, Verdict
from tidemill.worker.execute import WaitingJob
from tidemill.worker.slots import PoolThread, Prefetch, Slots


class StartedThreads:
    """The threads that would have been started; the system starts no more than ``most``."""

    def __init__(self) -> None:
        self.threads: list[PoolThread] = []
        self.most = 10

    def __call__(self, number: int, thread: PoolThread) -> bool:
        if len(self.threads) == self.most:
            return False
        assert number == len(self.threads) + 1
        self.threads.append(thread)
        return True


def slots_of(
    concurrency: int, threads: int | None = None, budget: int = 1000
) -> tuple[Any, StartedThreads]:
    started = StartedThreads()
    most = concurrency + 1 if threads is None else threads
    return Slots(concurrency, budget, most, started), started


def item(token: int, *, rank: int = 0, is_async: bool = False) -> Any:
    return WaitingJob(0, rank, token, token, None, None, SimpleNamespace(is_async=is_async))


def tokens(items: list[Any]) -> list[int]:
    return [it.token for it in items]


def reading(*threads: PoolThread) -> list[bool]:
    return [thread.reads for thread in threads]


def test_the_reader_keeps_the_first_job_and_another_reads_on() -> None:
    slots, started = slots_of(2)
    slots.begin()
    (reader,) = started.threads
    assert reader.reads
    slots.add([item(1)])
    assert slots.assign(reader) == []
    assert reader.job.token == 1
    assert reading(*started.threads) == [False, True]
    successor = started.threads[1]
    slots.add([item(2)])
    slots.assign(successor)
    assert successor.job.token == 2
    assert reading(*started.threads) == [False, False, True]
    assert slots.running == 2


def test_with_all_slots_taken_the_reader_goes_on_reading() -> None:
    slots, started = slots_of(1)
    slots.begin()
    slots.add([item(1), item(2)])
    slots.assign(started.threads[0])
    reader = started.threads[1]
    assert slots.assign(reader) == []
    assert reader.reads
    assert reader.job is None
    assert slots.next()[0].token == 2


def test_the_reader_keeps_none_of_several_jobs() -> None:
    slots, started = slots_of(3)
    slots.begin()
    reader = started.threads[0]
    slots.add([item(1, rank=5), item(2, rank=1), item(3, rank=9)])
    slots.assign(reader)
    assert reader.reads
    assert [thread.job.token for thread in started.threads[1:]] == [2, 1, 3]


def test_the_reader_takes_the_last_free_slot() -> None:
    slots, started = slots_of(1)
    slots.begin()
    slots.add([item(1, rank=5), item(2, rank=1)])
    slots.assign(started.threads[0])
    assert started.threads[0].job.token == 2


def test_a_parked_thread_is_woken_to_read_or_to_run() -> None:
    slots, started = slots_of(2)
    slots.begin()
    reader, parked = started.threads[0], PoolThread()
    slots.park(parked)
    slots.add([item(1)])
    slots.assign(reader)
    assert parked.wake.acquire(blocking=False)
    assert parked.reads
    assert len(started.threads) == 1  # no thread was started for it


def test_async_jobs_are_launched_and_the_reader_reads_on() -> None:
    slots, started = slots_of(2)
    slots.begin()
    slots.add([item(1, is_async=True), item(2, is_async=True), item(3, is_async=True)])
    assert tokens(slots.assign(started.threads[0])) == [1, 2]
    assert started.threads[0].reads
    assert tokens(slots.async_job_ended()) == [3]


def test_no_thread_starts_where_the_main_thread_runs_the_jobs() -> None:
    slots, started = slots_of(1, threads=0)
    main = PoolThread()
    slots.park(main)
    slots.add([item(1)])
    assert slots.assign() == []
    assert main.wake.acquire(blocking=False)
    assert main.job.token == 1
    assert started.threads == []


def test_waiting_jobs_go_back_when_no_job_starts_or_when_asked_for() -> None:
    slots, started = slots_of(1)
    slots.begin()
    slots.add([item(1), item(2), item(3)])
    slots.assign(started.threads[0])
    assert slots.tick() == []  # one has started since
    assert slots.withdraw(3)
    assert not slots.withdraw(3)
    assert slots.tick() == [2]
    assert slots.stop() == []
    assert not slots.add([item(4)])


def test_no_more_jobs_start_than_the_budget_allows() -> None:
    slots, started = slots_of(2, budget=1)
    slots.begin()
    slots.add([item(1), item(2)])
    assert slots.assign(started.threads[0]) == []
    assert (slots.running, slots.waiting) == (1, True)
    assert slots.next() == (None, [])


def test_the_end_wakes_parked_threads_and_threads_that_park_later() -> None:
    slots, _ = slots_of(2)
    early, late = PoolThread(), PoolThread()
    slots.park(early)
    slots.close()
    slots.park(late)
    assert slots.ended.is_set()
    assert early.wake.acquire(blocking=False)
    assert late.wake.acquire(blocking=False)


def test_a_job_keeps_waiting_when_no_thread_can_start_for_it() -> None:
    slots, started = slots_of(4)
    started.most = 1
    slots.begin()
    (reader,) = started.threads
    slots.add([item(1), item(2)])
    slots.assign(reader)
    assert reader.reads, "no other thread can read"
    assert slots.free == 4
    assert slots.budget == 1000
    assert slots.stop() == [1, 2]


def test_a_thread_starts_once_the_system_has_room_again() -> None:
    slots, started = slots_of(4)
    started.most = 1
    slots.begin()
    slots.add([item(1)])
    slots.assign(started.threads[0])
    started.most = 2
    slots.assign(started.threads[0])
    assert started.threads[0].job is not None
    assert started.threads[1].reads


def test_short_jobs_raise_the_prefetch_and_long_jobs_lower_it() -> None:
    prefetch = Prefetch(4)
    prefetch.measure([Verdict(1, Outcome.SUCCESS, started=100.0, ended=100.001)] * 8)
    assert prefetch.ahead > 4
    prefetch.measure([Verdict(1, Outcome.SUCCESS, started=100.0, ended=105.0)])
    assert prefetch.ahead == 0


def test_verdicts_without_times_leave_the_prefetch_as_it_is() -> None:
    # given long jobs that snooze or go back
    prefetch = Prefetch(4)
    snoozed = Verdict(1, Outcome.SNOOZE, delay=5.0)
    released = Verdict(2, Outcome.RELEASE, started=100.0)
    # when only they are measured, and when a long job is measured among them
    prefetch.measure([snoozed, released])
    assert prefetch.ahead == 4
    prefetch.measure([snoozed, Verdict(3, Outcome.SUCCESS, started=100.0, ended=105.0), released])
    # then
    assert prefetch.ahead == 0
