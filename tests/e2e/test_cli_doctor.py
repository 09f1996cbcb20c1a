"""``tidemill doctor`` finds each problem, names the remedy, and has an exit code."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_store import Desk
from click.testing import CliRunner
from harness import eventually
from moved_clock import MovedClock
from servers import Redis
from servers.http import JobServer

import tidemill.doctor.disk
import tidemill.doctor.queues
import tidemill.doctor.workers
from tidemill import Limit, State, Tidemill, __version__
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import HOLDS
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.look import inspect, search
from tidemill.cli import main
from tidemill.core.job import Owner
from tidemill.core.scoreboard import Scoreboard
from tidemill.doctor.examine import examine
from tidemill.doctor.findings import Seen
from tidemill.doctor.workers import clocks
from tidemill.errors import StoreFull
from tidemill.server import tokens

pytestmark = pytest.mark.everyday


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
    assert warnings["queues"] == "queue sums has 1 ready job and no worker"
    assert "start one: tidemill worker MODULE:VAR -Q sums" in desk.run("doctor").stdout
    assert "workers" not in warnings
    # given a worker of another queue
    desk.mill.broker.attach(Owner(id="w", name="w", queues=("other",), concurrency=1))
    assert "queues" in findings(desk, "warn")
    # given one of this queue
    desk.mill.broker.attach(Owner(id="w2", name="w2", queues=("sums",), concurrency=1))
    assert findings(desk, "warn") == {}


def test_a_lease_that_its_live_worker_does_not_know(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a lease of a worker that runs nothing
    job, broker = desk.add.enqueue(1), desk.mill.broker
    board = Scoreboard(str(tmp_path / "board"), 1)
    board.claim("w")
    broker.attach(Owner(id="w", name="w", concurrency=1, board=board.path))
    assert len(broker.exchange(Step("w", want=Want(1))).leases) == 1
    assert "leases" not in findings(desk, "fail")  # it may be about to start
    # when the lease is old
    monkeypatch.setattr(tidemill.doctor.workers, "STRAY", -3600.0)
    # then
    said = findings(desk, "fail")["leases"]
    assert said.startswith("1 running job held by a live worker that does not know of them")
    assert job.id in said
    # when a worker on another machine has the same name, then that worker may run the job
    broker.attach(Owner(id="elsewhere", name="w", concurrency=1))
    assert "leases" not in findings(desk, "fail")
    board.close()


def test_a_lease_that_its_worker_runs_is_known(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidemill.doctor.workers, "STRAY", -3600.0)
    go, running = threading.Event(), threading.Event()

    @desk.mill.task(name="holds")
    def holds() -> None:
        running.set()
        go.wait(60)

    holds.enqueue()
    with desk.mill.worker():
        assert running.wait(60)
        assert "leases" not in findings(desk, "fail")
        # and so are the leases of two workers with one name
        with desk.mill.worker(queues=["other"]):
            eventually(lambda: len(desk.mill.broker.owners()) == 2, "both workers are there")
            assert "leases" not in findings(desk, "fail")
        go.set()


def test_a_lease_of_a_worker_that_is_gone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a running job, and its worker
    job = desk.add.enqueue(1)
    desk.mill.broker.attach(Owner(id="w", name="w", concurrency=1))
    desk.mill.broker.exchange(Step("w", want=Want(1)))
    assert "leases" not in findings(desk, "fail")
    # when the store has the lease and not the worker
    monkeypatch.setattr(LmdbBroker, "owners", lambda self: [])
    # then
    said = findings(desk, "fail")["leases"]
    assert said.startswith("1 running job held by a worker that is gone")
    assert job.id in said


def test_workers_of_other_releases(desk: Desk) -> None:
    # given a real worker
    with desk.mill.worker(queues=["sums"]):
        eventually(desk.mill.broker.owners, "the worker is there")
        assert [*findings(desk, "warn")] == []
        assert desk.json("workers", "list")["workers"][0]["version"] == __version__
        # when there is one of another release
        desk.mill.broker.attach(Owner(id="w2", name="w2", concurrency=1, version="99.10.1"))
        said = findings(desk, "warn")["versions"]
        assert said.startswith(f"workers run different releases: {__version__} (1: ")
        assert said.endswith("; 99.10.1 (1: w2)")
    # then also when there are only workers of another release
    report = json.loads(desk.run("doctor", "--json").stdout)["checks"]
    (check,) = [c for c in report if c["check"] == "versions" and c["status"] == "warn"]
    assert "99.10.1 (1: w2)" in check["message"]
    assert check["advice"] == "use it here, too: pip install tidemill==99.10.1"


def test_an_older_worker_is_to_be_restarted(desk: Desk) -> None:
    for n in range(5):
        desk.mill.broker.attach(Owner(id=f"w{n}", name=f"w{n}", concurrency=1, version="0.0.9"))
    report = json.loads(desk.run("doctor", "--json").stdout)["checks"]
    (check,) = [c for c in report if c["check"] == "versions" and c["status"] == "warn"]
    assert check["message"].endswith("0.0.9 (5: w0, w1, w2 …)")
    assert check["advice"] == f"restart them with tidemill {__version__}"


@pytest.mark.parametrize(("by", "said"), [(-100.0, "ahead of"), (100.0, "behind")])
def test_a_clock_that_differs_from_the_clock_of_the_server(
    moved_clock: MovedClock, by: float, said: str
) -> None:
    # given a server, and a machine whose clock is wrong
    server = Redis("--appendonly", "yes")
    try:
        with Tidemill(server.url) as mill:
            assert [finding.status for finding in clocks(Seen(mill))] == ["ok"]
            moved_clock.set_wall(by)
            # then
            (finding,) = clocks(Seen(mill))
        assert finding.status == "warn"
        assert f"s {said} this machine's" in finding.message
    finally:
        server.close()


def test_a_redis_that_evicts_or_keeps_no_file() -> None:
    # given a server without a file, then one that evicts keys
    for options, said, advice in (
        ((), "the append-only file is off", "appendonly yes"),
        (
            ("--appendonly", "yes", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"),
            "maxmemory-policy is allkeys-lru: the server may throw jobs away",
            "maxmemory-policy noeviction",
        ),
    ):
        server = Redis(*options)
        try:
            result = CliRunner().invoke(main, ["doctor", "--url", server.url, "--json"])
            checks = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
            assert checks["durability"]["status"] == "warn"
            assert said in checks["durability"]["message"]
            assert advice in checks["durability"]["advice"]
        finally:
            server.close()


def test_a_limit_that_lets_nothing_start(desk: Desk) -> None:
    desk.mill.queue("sums", rate="0/s")
    desk.add.enqueue(1)
    assert "lets no job start, and 1 ready job waits" in findings(desk, "warn")["limits"]
    desk.mill.queue("sums").limit(rate=None)
    assert "limits" not in findings(desk, "warn")


def test_jobs_that_wait_for_a_limit_of_their_own(desk: Desk) -> None:
    desk.add.using(limit=Limit(concurrency=0, key="ada")).enqueue(1)
    assert "the oldest ready job of sums" in findings(desk, "ok")["backlog"]


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
    monkeypatch.setattr(tidemill.doctor.workers, "LATE", -2.0)
    # then
    result = desk.run("doctor")
    assert result.exit_code == 1
    assert f"1 running job past the timeout and still held, for example {job.id}" in result.stdout
    assert f"tidemill job {job.id}" in result.stdout


def test_a_map_whose_room_for_puts_is_used_up(tmp_path: Path) -> None:
    # given a small map, and puts until the store refuses one
    desk = Desk(tmp_path, "?map_size=1048576")
    try:
        desk.add.enqueue(1)
        assert "map" in findings(desk, "ok")
        with pytest.raises(StoreFull):
            fill(desk)
        # then the doctor knows that, too
        report = json.loads(desk.run("doctor", "--json").stdout)
        (check,) = (check for check in report["checks"] if check["check"] == "map")
        assert check["status"] == "fail"
        assert check["advice"].startswith("puts are refused: raise map_size")
        assert desk.run("doctor").exit_code == 1
    finally:
        desk.close()


def fill(desk: Desk) -> None:
    while True:
        desk.mill.queue("q").put(b"x" * 10_000)


def test_a_map_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidemill.doctor.disk, "NEARLY", 0.0)
    desk = Desk(tmp_path)
    desk.add.enqueue(1)
    try:
        assert "used of a map of" in findings(desk, "warn")["map"]
    finally:
        desk.close()


def test_a_viewer_at_a_server_elsewhere_is_not_checked_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a server, and a token that may only read
    token = tokens.create(tmp_path / "tokens.json", "look", tokens.Role.VIEWER)
    server = JobServer("--quiet", "--auth", str(tmp_path / "tokens.json"))
    try:
        url = server.url.replace("://", f"://:{token}@")
        # when the doctor runs on a machine without the store's folder
        monkeypatch.setattr(os.path, "isdir", lambda path: False)
        result = CliRunner().invoke(main, ["doctor", "--url", url, "--json"])
        # then
        checks = {c["check"]: c for c in json.loads(result.stdout)["checks"]}
        assert checks["writable"]["status"] == "ok"
        assert checks["writable"]["message"].startswith("not checked, as this token may only read")
        assert result.exit_code == 0
    finally:
        server.close()


def test_the_message_of_a_hold_is_no_backlog(desk: Desk) -> None:
    # given a place that is held, and a hold that waits for it
    limit = Limit(name="db", concurrency=1)
    with desk.mill.limits.hold(limit):
        waiting = threading.Thread(target=lambda: hold_once(desk, limit))
        waiting.start()
        eventually(lambda: [row for row in desk.mill.broker.stats() if row.ready], "it waits")
        # then no check speaks of the queues of holds
        assert HOLDS not in json.dumps(findings(desk))
        assert findings(desk, "ok")["backlog"] == "no job is ready"
        assert HOLDS not in desk.run("info").stdout
    waiting.join(60)
    assert not waiting.is_alive()


def hold_once(desk: Desk, limit: Limit) -> None:
    with desk.mill.limits.hold(limit):
        pass


def test_a_worker_whose_clock_is_wrong(desk: Desk) -> None:
    # case M5
    desk.mill.broker.attach(Owner(id="w", name="w1", ahead=5.5))
    desk.mill.broker.attach(Owner(id="x", name="x1", ahead=-4.5))
    message = "the clock of worker w1 was 5.5 s ahead of the store's when the worker started"
    assert findings(desk, "warn")["clock"] == message


def test_a_schedule_whose_next_time_is_days_too_late(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case M13
    desk.mill.schedules.add("well", desk.add.call(1), "0 3 * * *")
    with monkeypatch.context() as patch:
        MovedClock(patch).set_wall(3 * 86_400)
        desk.mill.schedules.add("s", desk.add.call(1), "0 3 * * *")
    message = "1 of 2 have a next time that is later than their rule says: s"
    assert findings(desk, "warn")["schedules"] == message


def test_a_store_with_many_queues(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # case M13
    # given queues of messages, and queues of tasks that no worker serves
    for n in range(40):
        desk.mill.queue(f"messages{n}").put(n)
    for n in range(15):
        desk.add.using(queue=f"q{n}").enqueue(1)
    desk.mill.broker.attach(Owner(id="w", name="w", queues=("other",), concurrency=1))
    looks: list[object] = []
    for module in (inspect, search):
        monkeypatch.setattr(module, "queue_rows", noting(looks, module.queue_rows))
    # when the doctor looks
    found = [finding for finding in examine(desk.mill) if finding.check == "queues"]
    # then it lists some of these queues, counts the others, and does not read all for each
    assert len(found) == 11
    assert found[-1].message == "5 more queues: paused, without a worker, or with old jobs"
    assert len(looks) < 15


def noting(calls: list[object], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which notes its calls."""

    def call(*args: object) -> object:
        calls.append(args)
        return function(*args)

    return call


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
    with monkeypatch.context() as patch:
        MovedClock(patch, wall=4_000_000_000.0)
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
        worker.join(180)
    assert len(desk.mill.jobs().page().records) == 100
    assert {r.state for r in desk.mill.jobs().page(limit=2000).records} == {State.SUCCEEDED}
