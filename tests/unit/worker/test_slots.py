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


def test_no_more_jobs_start_than_the_budget_allows() -> None:
    slots, started = slots_of(2, budget=1)
    slots.begin()
    slots.add([item(1), item(2)])
    assert slots.assign(started.threads[0]) == []
    assert (slots.running, slots.waiting) == (1, True)
    assert slots.next() == (None, [])


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
