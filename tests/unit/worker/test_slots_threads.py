"""The slots go on when the system starts no further thread."""

from types import SimpleNamespace
from typing import Any

from tidemill.worker.slots import PoolThread, Slots
from tidemill.worker.waiting_job import WaitingJob


class Pool:
    """Starts this many threads, and no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.threads: list[PoolThread] = []

    def __call__(self, number: int, thread: PoolThread) -> bool:
        if len(self.threads) == self.most:
            return False
        self.threads.append(thread)
        return True


def item(token: int) -> Any:
    return WaitingJob(0, 0, token, token, None, None, SimpleNamespace(is_async=False))


def test_a_job_keeps_waiting_when_no_thread_can_start_for_it() -> None:
    pool = Pool(1)
    slots = Slots(4, 1000, 5, pool)
    slots.begin()
    (reader,) = pool.threads
    slots.add([item(1), item(2)])
    slots.assign(reader)
    assert reader.reads, "no other thread can read"
    assert slots.free == 4
    assert slots.budget == 1000
    assert slots.stop() == [1, 2]


def test_a_thread_starts_once_the_system_has_room_again() -> None:
    pool = Pool(1)
    slots = Slots(4, 1000, 5, pool)
    slots.begin()
    slots.add([item(1)])
    slots.assign(pool.threads[0])
    pool.most = 2
    slots.assign(pool.threads[0])
    assert pool.threads[0].job is not None
    assert pool.threads[1].reads
