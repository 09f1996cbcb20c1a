"""The backlog goes on when the system starts no further thread."""

from types import SimpleNamespace
from typing import Any

from tidemill.worker.backlog import Backlog, Desk


class Pool:
    """Starts so many threads, and no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.desks: list[Desk] = []

    def __call__(self, number: int, desk: Desk) -> bool:
        if len(self.desks) == self.most:
            return False
        self.desks.append(desk)
        return True


def item(token: int) -> Any:
    return (0, 0, token, token, None, None, SimpleNamespace(is_async=False))


def test_a_job_keeps_waiting_when_no_thread_can_start_for_it() -> None:
    pool = Pool(1)
    backlog = Backlog(4, 1000, 5, pool)
    backlog.begin()
    (reader,) = pool.desks
    backlog.add([item(1), item(2)])
    backlog.deal(reader)
    assert reader.reads, "nobody else can read"
    assert backlog.free == 4
    assert backlog.budget == 1000
    assert backlog.stop() == [1, 2]


def test_a_thread_starts_once_the_system_has_room_again() -> None:
    pool = Pool(1)
    backlog = Backlog(4, 1000, 5, pool)
    backlog.begin()
    backlog.add([item(1)])
    backlog.deal(pool.desks[0])
    pool.most = 2
    backlog.deal(pool.desks[0])
    assert pool.desks[0].item is not None
    assert pool.desks[1].reads
