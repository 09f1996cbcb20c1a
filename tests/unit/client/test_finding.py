"""Jobs are found by task, group, state, key, tag and text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tidemill import Filter, InvalidOption, State, Tidemill, chain, group, map_many
from tidemill.client import search
from tidemill.testing import run_all


def inc(number: int) -> int:
    if number < 0:
        raise ValueError("no")
    return number + 1


def hear(ended: Any) -> None: ...


@pytest.fixture
def task(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(search, "_PAGE", 3)
    return mill.task(name="inc", retries=0)(inc)


def test_results_by_task_by_group_and_by_name(mill: Tidemill, task: Any) -> None:
    handle = mill.enqueue(map_many(task, range(7)))
    mill.enqueue(map_many(task, range(50, 52)))
    task.using(id="nightly", tags=["t"], key="k", queue="q").enqueue(99.5)  # which is in no id
    mill.enqueue(chain(task.call(200), task).on_complete(mill.task(name="told")(hear)))
    run_all(mill)
    members = mill.jobs(group=handle.id, task=task)
    assert [job.result() for job in members] == list(range(7, 0, -1))  # newest first
    assert sorted(job.result() for job in members) == handle.result()  # once more
    assert mill.job("nightly").result() == 100.5
    for what in ({"tag": "t"}, {"key": "k"}, {"queue": "q"}, {"text": "99.5"}):
        assert [job.id for job in mill.jobs(**what)] == ["nightly"]
    assert len(list(mill.jobs(task="inc"))) == 12
    assert list(mill.jobs(task="inc", state="failed")) == []
    assert len(list(mill.jobs(state=["succeeded", State.FAILED]))) == 13


def test_states(mill: Tidemill, task: Any) -> None:
    handle = mill.enqueue(group([task.call(-1), task.call(1), task.using(delay=600).call(2)]))
    run_all(mill)
    found = {
        state: [job.id for job in mill.jobs(group=handle.id, state=state)]
        for state in ("failed", "succeeded", "scheduled")
    }
    assert found == {
        "failed": [handle[0].id],
        "succeeded": [handle[1].id],
        "scheduled": [handle[2].id],
    }
    with pytest.raises(InvalidOption, match=r"one of waiting, .*'faild'; did you mean 'failed'"):
        mill.jobs(state="faild")
    with pytest.raises(InvalidOption, match=r"unknown option 'colour' of a search; known are"):
        mill.jobs(colour="red")
    failed = Filter(states=frozenset({State.FAILED}))
    assert [job.id for job in mill.jobs(failed)] == found["failed"]
    with pytest.raises(InvalidOption, match="either a Filter or options"):
        mill.jobs(failed, queue="mail")


def test_the_same_with_async_for(mill: Tidemill, task: Any) -> None:
    handle = mill.enqueue(map_many(task, range(7)))
    run_all(mill)

    async def main() -> None:
        found = [await job async for job in mill.jobs(group=handle.id)]
        assert found == list(range(7, 0, -1))

    asyncio.run(main())


def test_a_large_group_is_deleted_page_by_page(
    make_mill: Callable[..., Tidemill], monkeypatch: pytest.MonkeyPatch
) -> None:
    mill = make_mill()
    task = mill.task(name="inc", retries=0)(inc)
    told = mill.task(name="told")(hear)
    handle = mill.enqueue(group(task.call(n).on_failure(told) for n in range(1100)))
    most = 0
    delete = mill.broker.delete

    def watched(ids: list[str]) -> list[bool]:
        nonlocal most
        most = max(most, len(ids))
        return delete(ids)

    monkeypatch.setattr(mill.broker, "delete", watched)
    assert handle.delete()
    assert list(mill.jobs()) == []
    assert most <= 1000
    assert not handle.delete()


def test_a_search_takes_a_filter_or_options(mill: Tidemill) -> None:
    wrong: Any = "failed"
    with pytest.raises(InvalidOption, match="state='failed', not 'failed'"):
        mill.jobs(wrong)
