"""A job that succeeds when its store has no room: the outcome is kept, and not the result."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from harness import eventually

from tidemill import Queue, State, Tidemill
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.envelope import RESULT_NOT_KEPT
from tidemill.errors import ResultNotKept, StoreFull
from tidemill.testing import run_all


def fill(queue: Queue) -> None:
    with contextlib.suppress(StoreFull):
        while True:
            queue.put_many([b"x" * 1000] * 20)


def test_large_results_leave_the_reserve_of_a_full_map(tmp_path: Path) -> None:
    # case Q10, law 16
    # given a store whose map is filled by puts, with jobs that return much or little
    with Tidemill(f"lmdb://{tmp_path}/store?map_size=4194304&durability=relaxed") as mill:

        @mill.task
        def give(size: int) -> bytes:
            return b"x" * size

        large = [give.enqueue(100_000) for _ in range(20)]
        small = [give.enqueue(10) for _ in range(20)]
        fill(mill.queue("filler"))
        # when they run
        run_all(mill)
        # then all have succeeded, and the results that fit are there
        assert {job.refresh().state for job in (*large, *small)} == {State.SUCCEEDED}
        assert [job.result() for job in small] == [b"x" * 10] * 20
        with pytest.raises(ResultNotKept, match="had no room to keep its result"):
            large[-1].result()


@pytest.mark.parametrize("size", [0, 5000])
def test_a_store_that_has_no_room_never_makes_a_success_a_failure(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    # given a store that takes no result, and for a while nothing at all
    monkeypatch.setenv("TIDEMILL_WAITS", '{"retry": 0.01}')
    exchange, refused = mill.broker.exchange, []

    def full(step: Step) -> Reply:
        large = any(len(v.result) > len(RESULT_NOT_KEPT) for v in step.verdicts)
        if large or (step.verdicts and len(refused) < 10):
            refused.append(step)
            raise StoreFull("full")
        return exchange(step)

    @mill.task(retries=0)
    def give() -> str:
        return "x" * size

    job = give.enqueue()
    monkeypatch.setattr(mill.broker, "exchange", full)
    run_all(mill)
    eventually(lambda: job.refresh().state.finished, "its end")
    assert job.state is State.SUCCEEDED
    assert len(refused) >= 10
    if size:
        with pytest.raises(ResultNotKept):
            job.result()
    else:
        assert job.result() == ""
