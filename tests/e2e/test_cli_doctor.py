"""``tidemill doctor``: it finds what is wrong, says what to do, and its exit code tells."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_store import Desk

import tidemill.cli.doctor
from tidemill import Limit, State
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.core.job import Owner


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def findings(desk: Desk, status: str = "") -> dict[str, str]:
    """{check: message} of the checks with this status, or of all."""
    document = json.loads(desk.run("doctor", "--json").stdout)
    return {c["check"]: c["message"] for c in document["checks"] if status in ("", c["status"])}


def test_a_healthy_store(desk: Desk) -> None:
    desk.add.enqueue(1)
    desk.work()
    result = desk.run("doctor")
    assert result.exit_code == 0, result.output
    assert [line[:4] for line in result.stdout.splitlines()] == ["ok  "] * 10


def test_jobs_that_nobody_will_take(desk: Desk) -> None:
    # given a job and no worker
    desk.add.enqueue(1)
    # then
    warnings = findings(desk, "warn")
    assert warnings["queues"] == "queue sums has 1 ready jobs and no worker"
    assert "0 alive" in warnings["workers"]
    # given a worker of another queue
    desk.mill.broker.attach(Owner(id="w", name="w", queues=("other",), concurrency=1))
    assert "queues" in findings(desk, "warn")
    # given one of this queue
    desk.mill.broker.attach(Owner(id="w2", name="w2", queues=("sums",), concurrency=1))
    assert findings(desk, "warn") == {}


def test_messages_need_no_worker(desk: Desk) -> None:
    desk.mill.queue("orders").put(1)
    assert "queues" not in findings(desk, "warn")


def test_a_paused_queue(desk: Desk) -> None:
    desk.add.enqueue(1)
    desk.run("pause", "sums")
    assert "paused" in findings(desk, "warn")["queues"]


def test_a_limit_that_lets_nothing_start(desk: Desk) -> None:
    desk.mill.queue("sums", rate="0/s")
    desk.add.enqueue(1)
    assert "none of 1 ready jobs start" in findings(desk, "warn")["limits"]
    desk.mill.queue("sums").limit(rate=None)
    assert "limits" not in findings(desk, "warn")


def test_an_open_breaker(desk: Desk) -> None:
    # case S6
    desk.mill.queue("default", breaker=1)
    desk.bad.enqueue("x")
    desk.work()
    assert "the breaker of queue default is open" in findings(desk, "warn")["limits"]


def test_jobs_that_wait_for_a_limit_of_their_own(desk: Desk) -> None:
    desk.add.using(limit=Limit(concurrency=0, key="ada")).enqueue(1)
    assert "1 ready jobs wait for limits" in findings(desk, "ok")["backlog"]


def test_an_old_job(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.add.enqueue(1)
    monkeypatch.setattr(tidemill.cli.doctor, "OLD", -1.0)
    assert "the oldest ready job of sums" in findings(desk, "warn")["backlog"]


def test_relaxed_durability_is_told(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "?durability=relaxed")
    desk.add.enqueue(1)
    try:
        assert "not power loss" in findings(desk, "warn")["durability"]
    finally:
        desk.close()


def test_a_job_past_its_timeout(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a job that its owner holds without an end
    job = desk.add.using(timeout=1).enqueue(1)
    broker = desk.mill.broker
    broker.attach(Owner(id="w", name="w", concurrency=1))
    assert len(broker.exchange(Step("w", want=Want(1))).leases) == 1
    assert findings(desk, "fail") == {}
    # when its time is long over
    monkeypatch.setattr(tidemill.cli.doctor, "LATE", -2.0)
    # then
    result = desk.run("doctor")
    assert result.exit_code == 1
    assert f"1 running jobs past the timeout and still held, for example {job.id}" in result.stdout
    assert f"tidemill job {job.id}" in result.stdout


def test_a_full_disk(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # case Q10, as far as the doctor goes
    desk.add.enqueue(1)
    full: Any = SimpleNamespace(free=1 << 20, total=1 << 40, used=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    result = desk.run("doctor")
    assert result.exit_code == 1
    assert "make room" in result.stdout


def test_a_job_from_the_future(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # case Q9, as far as the doctor goes
    monkeypatch.setattr("tidemill.client.envelopes.wall_time", lambda: 4_000_000_000.0)
    desk.add.enqueue(1)
    assert "in the future" in findings(desk, "warn")["clock"]


def test_no_store_at_all(desk: Desk, tmp_path: Path) -> None:
    result = desk.run("doctor", "--url", f"lmdb://{tmp_path}/nowhere", url=False)
    assert result.exit_code == 1
    assert "there is no store" in result.stdout


def test_a_store_in_use_gets_no_false_alarm(desk: Desk) -> None:
    # given jobs that start and end while the doctor looks
    for n in range(2000):
        desk.add.using(timeout=30).enqueue(n)
    worker = threading.Thread(target=desk.work)
    worker.start()
    try:
        for _ in range(3):
            assert findings(desk, "fail") == {}
    finally:
        worker.join(60)
    assert len(desk.mill.find().records) == 100
    assert {r.state for r in desk.mill.find(limit=2000).records} == {State.SUCCEEDED}
