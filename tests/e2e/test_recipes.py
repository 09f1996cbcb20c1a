"""The recipes of docs/guide/middleware.md do in a worker what the page says."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from test_docs import ROOT, blocks

from tidemill import Tidemill, this_job
from tidemill.testing import run_all

pytestmark = pytest.mark.everyday

PAGE = ROOT / "docs" / "guide" / "middleware.md"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the Python blocks of the page that contain a text; the names that they define."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEMILL_URL", "memory://")

    def run(*wanted: str) -> dict[str, Any]:
        names: dict[str, Any] = {"Tidemill": Tidemill, "mill": Tidemill()}
        found = [b for b in blocks(PAGE, "python") if any(re.search(w, b) for w in wanted)]
        assert len(found) == len(wanted)
        for block in found:
            exec(compile(block, PAGE.name, "exec"), names)
        return names

    return run


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_timer_measures_sync_and_async_tasks(
    page: Any, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mill = page(r"def timed")["mill"]

    @mill.task(name="sync")
    def plain() -> None:
        time.sleep(0.05)

    @mill.task(name="async")
    async def waits() -> None:
        await asyncio.sleep(0.05)

    {"sync": plain, "async": waits}[kind].enqueue()
    run_all(mill)

    task, seconds = capsys.readouterr().out.split()
    assert task == kind
    assert float(seconds) >= 0.05


def test_a_request_id_follows_a_job_into_the_jobs_that_it_enqueues(page: Any) -> None:
    names = page(r'on\("enqueue"\)', r"def in_request")
    mill, request_id = names["mill"], names["request_id"]
    mill.on("enqueue")(names["remember_the_request"])
    seen = list[str]()

    @mill.task(name="outer")
    def outer() -> None:
        inner.enqueue()

    @mill.task(name="inner")
    def inner() -> None:
        job = this_job()
        seen.append(f"{job.headers['request']} {request_id.get()}")

    request_id.set("r17")
    outer.enqueue()
    request_id.set("")
    run_all(mill)

    assert seen == ["r17 r17"]


def test_a_task_finds_the_application_of_flask(page: Any) -> None:
    names = page(r"def in_app_context")

    job = names["greet"].enqueue("Ann")
    run_all(names["mill"])

    assert job.result() == "shop greets Ann"


def test_a_session_is_committed_with_the_job_and_rolled_back_with_its_error(page: Any) -> None:
    names = page(r"def in_session")
    mill, add, engine = names["mill"], names["add"], names["engine"]
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE customer (name text)"))

    @mill.task(name="fails", retries=0)
    def fails() -> None:
        add("Bob")
        raise ValueError("no")

    add.enqueue("Ann")
    fails.enqueue()
    run_all(mill)

    with engine.begin() as connection:
        assert connection.execute(text("SELECT name FROM customer")).scalars().all() == ["Ann"]
    engine.dispose()
