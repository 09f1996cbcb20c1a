"""When a worker stores, renews and removes the options of tasks."""

from __future__ import annotations

from typing import Any

import pytest
from moved_clock import MovedClock

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.contract.schedules import DECLARATION, Schedule
from tidemill.core.job import Owner
from tidemill.errors import StoreFull
from tidemill.worker.child_protocol import Hello
from tidemill.worker.declarations import KEEP, RENEW, WITHOUT_ROOM, TaskDeclarations


class Desk:
    """A store whose calls are counted, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = MovedClock(monkeypatch, speed=0.0)
        self.broker = Tidemill("memory://").broker
        self.reads = self.writes = 0
        read, write = self.broker.schedules, self.broker.change_schedules

        def schedules(names: Any) -> Any:
            self.reads += 1
            return read(names)

        def change_schedules(changes: Any) -> Any:
            self.writes += 1
            return write(changes)

        monkeypatch.setattr(self.broker, "schedules", schedules)
        monkeypatch.setattr(self.broker, "change_schedules", change_schedules)

    def found(self, name: str) -> Schedule | None:
        return self.broker.schedules([f"{DECLARATION}{name}"])[0]

    def calls(self) -> tuple[int, int]:
        """Reads and writes since the last time."""
        calls, self.reads, self.writes = (self.reads, self.writes), 0, 0
        return calls


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def hello(**bodies: bytes) -> Hello:
    return Hello(declared=list(bodies.items()))


def body(desk: Desk, name: str) -> bytes | None:
    found = desk.found(name)
    return found.body if found is not None else None


def test_a_worker_stores_its_tasks_in_one_call(desk: Desk) -> None:
    tasks = {f"t{n}": b"x" for n in range(500)}
    TaskDeclarations().declare(desk.broker, hello(**tasks))
    assert desk.calls() == (1, 1)
    assert body(desk, "t499") == b"x"


def test_unchanged_declarations_cost_one_read_at_the_start(desk: Desk) -> None:
    TaskDeclarations().declare(desk.broker, hello(a=b"1"))
    desk.calls()
    # when another worker starts, and both make turns
    second = TaskDeclarations()
    for _ in range(100):
        second.declare(desk.broker, hello(a=b"1"))
    assert desk.calls() == (1, 0)


def test_the_latest_declaration_holds_and_older_workers_only_renew(desk: Desk) -> None:
    # given a worker, and then one with new code
    old, new = TaskDeclarations(), TaskDeclarations()
    old.declare(desk.broker, hello(a=b"1", b=b"1"))
    desk.clock.advance(60)
    new.declare(desk.broker, hello(a=b"2"))
    assert (body(desk, "a"), body(desk, "b")) == (b"2", b"1")
    # when the older worker renews
    desk.clock.advance(RENEW)
    old.declare(desk.broker, hello(a=b"1", b=b"1"))
    found = desk.found("a")
    assert (found.body, found.due) == (b"2", desk.clock.wall() + KEEP)
    # when it loads the new code
    old.declare(desk.broker, hello(a=b"3"))
    assert body(desk, "a") == b"3"


def test_a_name_that_no_worker_renews_is_removed_after_thirty_days(desk: Desk) -> None:
    # given a task that the code no longer has, and one that it has
    gone, stays = TaskDeclarations(), TaskDeclarations()
    gone.declare(desk.broker, hello(a=b"1", b=b"1"))
    stays.declare(desk.broker, hello(b=b"1"))
    desk.broker.attach(Owner(id="w", name="w"))
    due = [found for found in (desk.found("a"), desk.found("b")) if found is not None]
    other = Schedule("s", 1)
    # when both come due at a worker that has one of them
    desk.clock.advance(KEEP)
    assert stays.expire(desk.broker, [*due, other]) == [other]
    # then
    assert body(desk, "a") is None
    assert body(desk, "b") == b"1"
    assert desk.broker.exchange(Step("w", fires=10)).schedules == []


def test_a_full_store_is_tried_again_later(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, change = TaskDeclarations(), desk.broker.change_schedules

    def full(changes: Any) -> Any:
        raise StoreFull("no room")

    monkeypatch.setattr(desk.broker, "change_schedules", full)
    worker.declare(desk.broker, hello(a=b"1"))
    monkeypatch.setattr(desk.broker, "change_schedules", change)
    worker.declare(desk.broker, hello(a=b"1"))
    assert body(desk, "a") is None
    desk.clock.advance(WITHOUT_ROOM)
    worker.declare(desk.broker, hello(a=b"1"))
    assert body(desk, "a") == b"1"
