"""Functions that the app calls when a job is enqueued, and which functions it takes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidemill import InvalidOption, Tidemill, this_job
from tidemill.testing import run_all
from tidemill.typing import NewJob


@pytest.fixture
def mill() -> Tidemill:
    return Tidemill("memory://")


def test_a_handler_adds_headers_to_every_job_of_the_app(mill: Tidemill) -> None:
    seen = list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]()

    @mill.on("enqueue")
    def tag(job: NewJob) -> None:
        seen.append((job.task, job.queue, job.args, dict(job.kwargs)))
        job.headers["request"] = f"r{len(seen)}"

    @mill.task(name="echo", queue="mail")
    def echo(value: int = 0) -> str:
        job = this_job()
        return f"{job.headers['request']} {job.headers.get('own', '')}"

    jobs = [echo.using(headers={"own": "x"}).enqueue(1), *mill.enqueue_many([echo.call(value=2)])]
    jobs.append(asyncio.run(echo.aenqueue(3)))
    with mill.batch():
        jobs.append(echo.enqueue(4))
    run_all(mill)

    assert [job.result() for job in jobs] == ["r1 x", "r2 ", "r3 ", "r4 "]
    assert seen[:2] == [("echo", "mail", (1,), {}), ("echo", "mail", (), {"value": 2})]


def test_handlers_also_see_jobs_that_run_at_once() -> None:
    mill = Tidemill("memory://", sync=True)
    mill.on("enqueue")(lambda job: job.headers.update(tenant="acme"))

    @mill.task
    def whose() -> str:
        job = this_job()
        return job.headers["tenant"]

    assert whose.enqueue().result() == "acme"


def test_nothing_is_stored_when_a_handler_raises(mill: Tidemill) -> None:
    @mill.on("enqueue")
    def refuse(job: NewJob) -> None:
        if job.args[0] == 2:
            raise PermissionError("not this job")

    @mill.task(name="echo")
    def echo(value: int) -> int:
        return value

    with pytest.raises(PermissionError, match="not this job"):
        mill.enqueue_many([echo.call(1), echo.call(2)])
    assert not list(mill.jobs())


def test_a_header_that_is_no_text_is_refused(mill: Tidemill) -> None:
    mill.on("enqueue")(lambda job: job.headers.update(number=3))
    echo = mill.task(lambda_free)

    with pytest.raises(InvalidOption, match="headers must map strings to strings"):
        echo.enqueue()


def lambda_free() -> None: ...


def test_unknown_events_and_functions_that_do_not_fit_are_refused(mill: Tidemill) -> None:
    async def waits(job: NewJob) -> None: ...

    with pytest.raises(InvalidOption, match="did you mean 'process_start'"):
        mill.on("proces_start")  # type: ignore[call-overload]
    with pytest.raises(InvalidOption, match="must take no argument"):
        mill.on("process_stop")(lambda job: None)  # type: ignore[arg-type,misc]
    with pytest.raises(InvalidOption, match="must take one argument, the new job"):
        mill.on("enqueue")(lambda: None)  # type: ignore[arg-type,misc]
    with pytest.raises(InvalidOption, match="is async"):
        mill.on("enqueue")(waits)  # type: ignore[type-var]
