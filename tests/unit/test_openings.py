"""A group whose producer dies between two pieces is ended, once, and no other is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidemill import Ended, State, Tidemill, chain, enqueuing, group, map_many, openings
from tidemill.testing import run_all

MOST = 20


class Killed(BaseException):
    """In the place of a kill: nothing that comes after it in the producer is done."""


class Desk:
    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self.told: list[Ended] = []
        self.inc = mill.task(name="inc")(inc)
        self.total = mill.task(name="total")(total)

        @mill.task(name="hook")
        def hook(ended: Ended) -> None:
            self.told.append(ended)

        self.hook = hook

    def calls(self, count: int, *, then: Callable[[], object] = int) -> Iterator[Any]:
        for number in range(count):
            yield self.inc.call(number)
        then()

    def killed(self, monkeypatch: pytest.MonkeyPatch, whole: Any) -> None:
        """Enqueue in a process that is killed at the end of its source."""
        with monkeypatch.context() as patch:
            patch.setattr(enqueuing, "abandon", lambda *_: None)
            patch.setattr(self.mill.broker, "delete", lambda ids: [False])
            with pytest.raises(Killed):
                self.mill.enqueue(whole)


@pytest.fixture
def desk(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(enqueuing, "AT_ONCE", MOST)
    return Desk(mill)


def kill() -> None:
    raise Killed


def more(desk: Desk, group_id: str, numbers: range) -> None:
    """The producer lives: it puts more members."""
    from tidemill.inputs import member_id
    from tidemill.job import Links

    links = Links((group_id,))
    calls = [(desk.inc.call(n), member_id(group_id, n)) for n in numbers]
    desk.mill.broker.put([desk.mill.envelope(call, name, links) for call, name in calls])


@pytest.mark.parametrize("source", ["iterator", "sized"])
def test_a_group_whose_producer_died_ends_and_its_hooks_are_called(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    # case C2
    class Numbers(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(1030)
            kill()

    members = map_many(desk.inc, Numbers([0] * 1100))
    if source == "iterator":
        members = group(desk.calls(1030, then=kill))
    whole = chain(members.on_complete(desk.hook), desk.total).on_failure(desk.hook)
    desk.killed(monkeypatch, whole.using(id="w"))
    run_all(desk.mill)
    barrier = desk.mill.job("w.0000")
    assert barrier.state is State.WAITING
    assert desk.mill.job("w.0000.open").state is State.SCHEDULED
    run_all(desk.mill, scheduled=True)
    assert barrier.state is State.CANCELLED
    assert desk.mill.job("w").state is State.CANCELLED
    assert sorted(end.id for end in desk.told) == ["w", "w.0000"]
    assert not any(end.succeeded for end in desk.told)
    assert not list(desk.mill.jobs(state=["waiting", "scheduled", "ready", "running"]))


def test_a_producer_that_is_slow_is_let_be(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.killed(monkeypatch, group(desk.calls(1030, then=kill)).using(id="g"))
    looks = 0
    snooze = openings.Snooze

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks < 4:  # between two looks of the guard
            there = len(list(desk.mill.jobs(group="g", task="inc")))
            more(desk, "g", range(there, there + 20))
        return snooze(*args)

    monkeypatch.setattr(openings, "Snooze", counted)
    run_all(desk.mill, scheduled=True)
    assert looks == 4
    assert desk.mill.job("g").state is State.CANCELLED  # at last nothing came


def test_a_group_that_is_whole_is_never_given_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill, late = desk.mill, desk.inc.using(queue="later")
    calls = [desk.inc.call(0), *(late.call(n) for n in range(1, 1100))]
    delete = mill.broker.delete
    with monkeypatch.context() as patch:
        patch.setattr(mill.broker, "delete", lambda ids: [False])  # killed just before
        handle = mill.enqueue(group(iter(calls)).using(id="g"))
    looks = 0
    snooze = openings.Snooze

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks == 5:
            delete(["g.open"])
        return snooze(*args)

    monkeypatch.setattr(openings, "Snooze", counted)
    run_all(mill, queues=["default"], scheduled=True)
    assert looks == 5
    run_all(mill)
    assert handle.results(0) == list(range(1, 1101))


def test_where_all_goes_well_no_guard_is_left(desk: Desk) -> None:
    handle = desk.mill.enqueue(group(desk.calls(1100)))
    assert not list(desk.mill.jobs(task="tidemill.guard"))
    (row,) = desk.mill.queues()
    run_all(desk.mill)
    assert handle.state is State.SUCCEEDED
    small = desk.mill.enqueue(group(desk.calls(MOST - 3)))
    run_all(desk.mill)
    assert small.state is State.SUCCEEDED
    assert row.accepted == 1100 + 3  # the group, its census, the guard


def inc(number: int) -> int:
    return number + 1


def total(numbers: list[int]) -> int:
    return sum(numbers)
