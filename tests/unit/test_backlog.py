"""Who gets a slot, who runs, and who reads on meanwhile."""

from types import SimpleNamespace
from typing import Any

from tidemill.worker.backlog import Backlog, Desk


class Hired:
    """Desks of threads that would have been started."""

    def __init__(self) -> None:
        self.desks: list[Desk] = []

    def __call__(self, number: int, desk: Desk) -> bool:
        assert number == len(self.desks) + 1
        self.desks.append(desk)
        return True


def backlog_of(slots: int, threads: int | None = None, budget: int = 1000) -> tuple[Any, Hired]:
    hired = Hired()
    most = slots + 1 if threads is None else threads
    return Backlog(slots, budget, most, hired), hired


def item(token: int, *, rank: int = 0, is_async: bool = False) -> Any:
    return (0, rank, token, token, None, None, SimpleNamespace(is_async=is_async))


def tokens(items: list[Any]) -> list[int]:
    return [it[3] for it in items]


def reading(*desks: Desk) -> list[bool]:
    return [desk.reads for desk in desks]


def test_the_reader_keeps_the_first_job_and_another_reads_on() -> None:
    backlog, hired = backlog_of(2)
    backlog.begin()
    (reader,) = hired.desks
    assert reader.reads
    backlog.add([item(1)])
    assert backlog.deal(reader) == []
    assert reader.item[3] == 1
    assert reading(*hired.desks) == [False, True]
    successor = hired.desks[1]
    backlog.add([item(2)])
    backlog.deal(successor)
    assert successor.item[3] == 2
    assert reading(*hired.desks) == [False, False, True]
    assert backlog.running == 2


def test_with_all_slots_taken_the_reader_goes_on_reading() -> None:
    backlog, hired = backlog_of(1)
    backlog.begin()
    backlog.add([item(1), item(2)])
    backlog.deal(hired.desks[0])
    reader = hired.desks[1]
    assert backlog.deal(reader) == []
    assert reader.reads
    assert reader.item is None
    assert backlog.next()[0][3] == 2


def test_of_several_the_reader_keeps_none() -> None:
    backlog, hired = backlog_of(3)
    backlog.begin()
    reader = hired.desks[0]
    backlog.add([item(1, rank=5), item(2, rank=1), item(3, rank=9)])
    backlog.deal(reader)
    assert reader.reads
    assert [desk.item[3] for desk in hired.desks[1:]] == [2, 1, 3]


def test_the_last_free_slot_is_the_readers() -> None:
    backlog, hired = backlog_of(1)
    backlog.begin()
    backlog.add([item(1, rank=5), item(2, rank=1)])
    backlog.deal(hired.desks[0])
    assert hired.desks[0].item[3] == 2


def test_a_parked_thread_is_woken_to_read_or_to_run() -> None:
    backlog, hired = backlog_of(2)
    backlog.begin()
    reader, parked = hired.desks[0], Desk()
    backlog.park(parked)
    backlog.add([item(1)])
    backlog.deal(reader)
    assert parked.wake.acquire(blocking=False)
    assert parked.reads
    assert len(hired.desks) == 1  # nobody was hired for it


def test_async_jobs_are_launched_and_the_reader_reads_on() -> None:
    backlog, hired = backlog_of(2)
    backlog.begin()
    backlog.add([item(1, is_async=True), item(2, is_async=True), item(3, is_async=True)])
    assert tokens(backlog.deal(hired.desks[0])) == [1, 2]
    assert hired.desks[0].reads
    assert tokens(backlog.ended_elsewhere()) == [3]


def test_where_the_main_thread_runs_the_jobs_nobody_is_hired() -> None:
    backlog, hired = backlog_of(1, threads=0)
    main = Desk()
    backlog.park(main)
    backlog.add([item(1)])
    assert backlog.deal() == []
    assert main.wake.acquire(blocking=False)
    assert main.item[3] == 1
    assert hired.desks == []


def test_what_waits_goes_back_when_nothing_moves_or_when_it_is_asked_for() -> None:
    backlog, hired = backlog_of(1)
    backlog.begin()
    backlog.add([item(1), item(2), item(3)])
    backlog.deal(hired.desks[0])
    assert backlog.tick() == (False, [])  # one has started since
    assert backlog.withdraw(3)
    assert not backlog.withdraw(3)
    assert backlog.tick() == (False, [2])
    assert backlog.stop() == []
    assert not backlog.add([item(4)])


def test_the_budget_is_kept() -> None:
    backlog, hired = backlog_of(2, budget=1)
    backlog.begin()
    backlog.add([item(1), item(2)])
    assert backlog.deal(hired.desks[0]) == []
    assert (backlog.running, backlog.waiting) == (1, True)
    assert backlog.next() == (None, [])


def test_the_end_wakes_all_who_wait_and_who_comes_later() -> None:
    backlog, _ = backlog_of(2)
    early, late = Desk(), Desk()
    backlog.park(early)
    backlog.close()
    backlog.park(late)
    assert backlog.ended.is_set()
    assert early.wake.acquire(blocking=False)
    assert late.wake.acquire(blocking=False)
