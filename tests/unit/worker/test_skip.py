"""Middleware skips a job: it raises ``Skip``, or returns without calling the task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidemill import Job, JobContext, Skip, State, Tidemill
from tidemill.testing import run_all


def skips_odd(call_next: Callable[[], Any], context: JobContext) -> Any:
    if "odd" in context.tags:
        raise Skip("odd")
    if "no reason" in context.tags:
        raise Skip
    return "instead" if "instead" in context.tags else call_next()


async def async_layer(call_next: Callable[[], Any], context: JobContext) -> Any:
    return await call_next()


@pytest.fixture(params=["worker", "inline"])
def run(request: pytest.FixtureRequest) -> Callable[..., Job[Any]]:
    """Enqueue a call of ``work`` with a tag, in an app with middleware, and run it."""
    inline = request.param == "inline"

    def run(work: Callable[..., Any], tag: str, *layers: Any) -> Job[Any]:
        mill = Tidemill("memory://", middleware=[*layers, skips_odd], sync=inline)
        job = mill.task(work).using(tags=[tag]).enqueue()
        if not inline:
            run_all(mill)
        return job

    return run


def work() -> str:
    return "done"


async def later() -> str:
    return "done"


@pytest.mark.parametrize("task", [work, later])
@pytest.mark.parametrize(
    ("tag", "result", "lines"),
    [
        ("odd", None, ["skipped: odd"]),
        ("no reason", None, ["skipped"]),
        ("instead", "instead", []),
        ("even", "done", []),
    ],
)
def test_a_skipped_job_succeeds_without_its_task(
    run: Callable[..., Job[Any]], task: Any, tag: str, result: Any, lines: list[str]
) -> None:
    job = run(task, tag, async_layer) if task is later else run(task, tag)
    assert (job.state, job.result(timeout=0)) == (State.SUCCEEDED, result)
    assert [line for _, line in job.record.log] == lines


def test_a_task_may_skip_itself(run: Callable[..., Job[Any]]) -> None:
    def skips() -> None:
        raise Skip("nothing new")

    job = run(skips, "even")
    assert (job.state, job.result(timeout=0)) == (State.SUCCEEDED, None)
    assert [line for _, line in job.record.log] == ["skipped: nothing new"]
