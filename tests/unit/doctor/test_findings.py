"""What is wrong, in the same sentences in ``doctor``, on the overview and in ``top``."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dashboard_desk import Visitor
from moved_clock import MovedClock

from tidemill import Breaker, Limit, Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.schedules import Change
from tidemill.cli import main
from tidemill.cli.top.snapshot import Meter, take
from tidemill.cli.top.view import headline
from tidemill.client.explain import explain_in
from tidemill.core.job import Outcome, Owner, Verdict
from tidemill.core.verdicts import given_back
from tidemill.doctor import queues
from tidemill.doctor.examine import examine, problems
from tidemill.testing import run_all
from tidemill.worker.child_protocol import Hello
from tidemill.worker.declarations import TaskDeclarations


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    return MovedClock(monkeypatch, speed=0.0)


@pytest.fixture
def mill(tmp_path: Path, clock: MovedClock) -> Iterator[Tidemill]:
    with Tidemill(f"lmdb://{tmp_path}/store") as mill:
        yield mill


def attach(mill: Tidemill, kind: str = "worker", **facts: Any) -> None:
    mill.broker.attach(Owner(id="w1", name="w1", kind=kind, concurrency=4, **facts))


def fail_once(mill: Tidemill) -> None:
    [lease] = mill.broker.exchange(Step("w1", want=Want(1))).leases
    mill.broker.exchange(Step("w1", [Verdict(lease.token, Outcome.FAIL, error="E: no")]))


def found(mill: Tidemill) -> list[str]:
    """The messages of all problems, after a check that all places say them."""
    told = [finding.message for finding in problems(mill)]
    report = CliRunner().invoke(main, ["doctor", "--json", "--url", mill.broker.url])
    lines = [check["message"] for check in json.loads(report.stdout)["checks"]]
    same = {re.sub(r"[\d.]+ m?s", "TIME", line) for line in lines}
    assert {re.sub(r"[\d.]+ m?s", "TIME", line) for line in told} <= same
    page = html.unescape(Visitor(mill).get("/"))
    banners = re.findall(r'<div class="banner \w+">.*?<span>(.*?)\.[ <]', page, re.DOTALL)
    shown = {re.sub(r"[\d.]+ m?s", "TIME", banner.lower()) for banner in banners}
    assert shown == {re.sub(r"[\d.]+ m?s", "TIME", line.lower()) for line in told}
    return told


def notes_in_top(mill: Tidemill) -> dict[str, str]:
    return {row.stats.name: row.note for row in take(mill, Meter()).queues if row.note}


def test_nothing_is_wrong_with_an_idle_store(mill: Tidemill) -> None:  # case M17
    assert found(mill) == []
    assert notes_in_top(mill) == {}


def test_a_fetched_job_is_not_called_running(  # case M17
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a worker with 4 slots that holds 10 jobs
    attach(mill)
    send = mill.task(name="send", queue="mail")(print)
    for _ in range(10):
        send.enqueue()
    mill.broker.exchange(Step("w1", want=Want(10)))
    # then every place says that 4 run, and that 6 wait in their worker
    said = {"/": "Running 4 and 6 fetched", "/queues": "0 4 and 6 fetched"}
    said |= {"/queues/mail": "Running 4 and 6 fetched"}
    said |= {"/workers": "4 of 4 slots busy, 6 jobs fetched"}
    for path, text in said.items():
        assert text in words(Visitor(mill).get(path)), path
    assert "4 running, 6 fetched" in headline(take(mill, Meter()))
    assert [row.fetched for row in take(mill, Meter()).queues] == [6]
    [leases] = [one for one in examine(mill) if one.check == "leases"]
    assert leases.message.startswith("4 running, 6 fetched, held by")
    # and a look that did not read all held jobs says what is known
    monkeypatch.setattr("tidemill.doctor.held.MOST", 5)
    assert "Running or fetched 10 now" in words(Visitor(mill).get("/"))
    assert "10 running or fetched" in words(Visitor(mill).get("/queues"))
    assert "10 running or fetched" in headline(take(mill, Meter()))


def test_holds_hide_no_running_job(mill: Tidemill) -> None:  # case M17
    # given a running job and, leased later, two places of a limit; their queues are not shown
    attach(mill)
    job = mill.task(name="send", queue="mail")(print).enqueue()
    mill.broker.exchange(Step("w1", want=Want(1)))
    db = Limit(name="db", concurrency=2)
    with mill.limits.hold(db), mill.limits.hold(db):
        assert job.id in [one.id for one in take(mill, Meter()).jobs]
        assert "1 of 4 slots busy" in words(Visitor(mill).get("/workers"))


def test_a_task_that_no_worker_knows_is_named(mill: Tidemill) -> None:  # case T2, law 7
    # given two jobs that a worker has given back
    attach(mill)
    ids = [mill.enqueue(mill.call("other.report").using(queue="default")).id for _ in range(2)]
    leases = mill.broker.exchange(Step("w1", want=Want(2))).leases
    mill.broker.exchange(Step("w1", [given_back(it.token, it.open()) for it in leases]))
    # then the doctor names the task, and explain says what to do
    [told] = found(mill)
    assert told.startswith("no worker knows task other.report: 2 jobs of queue default, tried")
    sentence = explain_in(mill.broker, mill.job(ids[0]).refresh())
    assert sentence.endswith("start a worker whose app has 'other.report'")


def test_ready_jobs_of_a_paused_queue_are_ready(mill: Tidemill) -> None:  # case M17
    mill.queue("mail").put_many([1, 2, 3])
    mill.broker.set_queue("mail", paused=True)
    [backlog] = [one for one in examine(mill) if one.check == "backlog"]
    assert backlog.message == "3 ready jobs in paused queues, or of unknown age"


def words(text: str) -> str:
    """The text of a page as a reader sees it, in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text.partition("<main")[2])).split())


@pytest.mark.parametrize(
    ("queues", "paused", "says"),
    [
        (("a",), (), {"queue a has 1 ready job and no worker"}),
        (("a",), ("a",), {"queue a is paused with 1 ready job, and has no worker"}),
        (("a", "b"), (), {"no worker is alive, and 2 unfinished jobs of 2 queues wait"}),
        (
            *(("a", "b"), ("b",)),
            {
                "no worker is alive, and 2 unfinished jobs of 2 queues wait",
                "queue b is paused with 1 ready job",
            },
        ),
    ],
)
def test_a_queue_without_a_worker_is_told_once(  # case M17
    mill: Tidemill, queues: tuple[str, ...], paused: tuple[str, ...], says: set[str]
) -> None:
    for queue in queues:
        mill.task(name=f"of.{queue}", queue=queue)(print).enqueue()
    for queue in paused:
        mill.broker.set_queue(queue, paused=True)
    assert set(found(mill)) == says
    report = {one.message for one in examine(mill) if one.status != "ok"}
    assert {message for message in report if "worker" in message or "paused" in message} == says


def test_a_breaker_is_open_while_it_blocks(mill: Tidemill, clock: MovedClock) -> None:  # case M17
    # given a queue whose jobs fail in a row
    mill.queue("partner", rate="2/s", breaker=Breaker(2, pause=100))
    push = mill.task(name="push", queue="partner", retries=0)(print)
    attach(mill)
    for _ in range(3):
        push.enqueue()
    for _ in range(2):
        fail_once(mill)
        clock.advance(1)
    # then the breaker is open while no job starts
    [message] = found(mill)
    failed = "2 attempts failed in a row: the breaker of queue partner"
    assert re.fullmatch(rf"{failed} is open for 1 min 3\d s more", message)
    assert notes_in_top(mill) == {"partner": "breaker open"}
    # and no longer when one job may start
    clock.advance(100)
    assert found(mill) == [f"{failed} tries one job"]
    assert notes_in_top(mill) == {"partner": "breaker tries"}


def test_old_jobs_and_messages_that_nobody_takes(
    mill: Tidemill, clock: MovedClock
) -> None:  # case M17
    # given jobs with a worker, and messages without a consumer
    mill.task(name="send", queue="mail")(print).enqueue()
    mill.queue("orders").put_many([1, 2])
    attach(mill, queues=("mail",))
    assert found(mill) == []
    # when they wait for long
    clock.advance(queues.OLD + 20)
    attach(mill, queues=("mail",))
    # then
    assert found(mill) == [
        "queue mail has 1 ready job, the oldest 5 min 20 s old",
        "queue orders has 2 ready jobs, the oldest 5 min 20 s old, and no consumer lives",
    ]
    assert notes_in_top(mill) == {"mail": "old jobs", "orders": "no consumer"}


def test_a_task_that_only_workers_have_is_known(mill: Tidemill) -> None:  # case M17
    # given an app that has one task, and schedules of two other tasks
    mill.task(name="shown")(print)
    for task in ("report", "lost"):
        mill.schedules.add(task, mill.call(task).using(queue="q"), every=3600)
    unknown = "name a task that neither this app nor a worker has"
    assert [one.message for one in problems(mill)] == [
        f"2 of 2 {unknown}: lost (lost), report (report)"
    ]
    # when a worker declares the tasks
    TaskDeclarations().declare(mill.broker, Hello(declared=[("report", b"")]))
    assert [one.message for one in problems(mill)] == [f"1 of 2 {unknown}: lost (lost)"]
    assert words(Visitor(mill).get("/schedules")).count("unknown task") == 1
    TaskDeclarations().declare(mill.broker, Hello(declared=[("lost", b"")]))
    # then no place calls them unknown
    assert found(mill) == []
    assert "unknown task" not in Visitor(mill).get("/schedules")
    assert mill.schedules.get("lost").known


def test_a_schedule_of_another_version_is_no_unknown_task(mill: Tidemill) -> None:  # case M17
    mill.task(name="shown")(print)
    mill.broker.change_schedules([Change("newer", 0, 1e11, b"of another version")])
    assert [(row.task, row.known) for row in mill.schedules] == [("?", None)]


def test_a_schedule_whose_latest_job_failed(mill: Tidemill, clock: MovedClock) -> None:  # case M17
    @mill.task(name="sync", retries=0)
    def sync(shop: str, good: bool) -> None:
        if not good:
            raise ValueError(f"shop {shop} did not answer")

    for shop, good in (("eu", False), ("us", True)):
        mill.schedules.add(f"stock {shop}", sync.call(shop, good), every=3600)
        mill.schedules.run(f"stock {shop}")
    run_all(mill)
    # then
    [message] = found(mill)
    assert message == (
        "the latest job of schedule stock eu failed: ValueError: shop eu did not answer"
    )


def test_a_store_that_moves_asks_for_no_worker(mill: Tidemill) -> None:
    # given jobs of two tasks that no worker knows
    for queue in ("a", "b"):
        mill.enqueue(mill.call("t").using(queue=queue))
    assert "no worker is alive, and 2 unfinished jobs of 2 queues wait" in found(mill)
    # when
    mill.broker.depart("lmdb:///elsewhere")
    # then
    assert found(mill) == ["all of this store goes to lmdb:///elsewhere"]
