"""Rates and trends on the dashboard, of young stores and of queues that were filled at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from dashboard_desk import Visitor, words
from moved_clock import MovedClock
from test_dashboard_pages import tile

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.cli import main
from tidemill.client.history import QueueSnapshots
from tidemill.core.job import Outcome, Owner, Verdict
from tidemill.testing import run_all

NOW = 1_000_000 * 3600 + 30 * 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    return MovedClock(monkeypatch, speed=0.01, wall=NOW)


@pytest.fixture
def mill(tmp_path: Path, clock: MovedClock) -> Iterator[Tidemill]:
    with Tidemill(f"lmdb://{tmp_path}/store") as mill:
        yield mill


def put(mill: Tidemill, count: int) -> None:
    mill.queue("mail").put_many(list(range(count)))


def end(mill: Tidemill, count: int) -> None:
    want = Want(count=count, queues=("mail",), tasks=False, messages=True)
    leases = mill.broker.exchange(Step("w1", want=want)).leases
    mill.broker.exchange(Step("w1", [Verdict(one.token, Outcome.SUCCESS) for one in leases]))


@pytest.mark.parametrize("puts", [0, 40])
def test_a_queue_grows_only_while_its_depth_rises(  # case M17
    mill: Tidemill, clock: MovedClock, puts: int
) -> None:
    # given a queue that was filled at once three minutes ago, and has ended 20 jobs each minute
    mill.broker.attach(Owner(id="w1", name="w1", concurrency=4))
    snapshots = QueueSnapshots()
    for jobs in (0, 100, puts, puts):
        put(mill, jobs)
        end(mill, 20)
        snapshots.acted()
        snapshots.keep(mill.broker)
        clock.advance(60)
    put(mill, puts)
    end(mill, 20)
    clock.advance(30)
    text = Visitor(mill).get("/queues/mail")
    # then it empties, unless more jobs come than end
    grows = puts > 20
    assert ("the queue grows" in text) is grows
    assert (tile(text, "Empty in")[0] == "never") is grows
    assert ("grows" in words(Visitor(mill).get("/queues"))) is grows


def test_a_rate_counts_the_time_since_the_store_was_made(  # case M17
    mill: Tidemill, clock: MovedClock
) -> None:
    # given a store that is two minutes old, in which 240 jobs have come and run
    task = mill.task(name="send", queue="mail")(print)
    mill.enqueue_many([task.call() for _ in range(240)])
    run_all(mill)
    QueueSnapshots().keep(mill.broker)
    clock.advance(120)
    # then the rates are over these two minutes, for each window
    anna = Visitor(mill)
    assert tile(anna.get("/"), "Throughput")[0] == "2/s"
    assert tile(anna.get("/?over=24h"), "Throughput")[0] == "2/s"
    assert tile(anna.get("/tasks/send"), "Runs")[0] == "2/s"
    assert [tile(anna.get("/queues/mail"), name)[0] for name in ("In", "Out")] == ["2/s"] * 2
    shown = CliRunner().invoke(main, ["info", "--url", mill.broker.url]).stdout
    assert "120.0" in shown  # per minute


def test_jobs_from_before_the_history_count_over_their_age(  # case M17
    mill: Tidemill, clock: MovedClock
) -> None:
    # given jobs that came an hour before a worker or a server began the history
    put(mill, 360)
    clock.advance(3600)
    QueueSnapshots().keep(mill.broker)
    clock.advance(10)
    assert tile(Visitor(mill).get("/queues/mail"), "In")[0] == "5.98/min"


def test_jobs_that_came_while_nobody_counted_are_no_trend(  # case M17
    mill: Tidemill, clock: MovedClock
) -> None:
    # given 100 jobs that came at once after the last worker had left, 43 minutes ago
    mill.broker.attach(Owner(id="w1", name="w1", concurrency=4))
    snapshots = QueueSnapshots()
    put(mill, 20)
    end(mill, 20)
    snapshots.acted()
    clock.advance(60)
    snapshots.keep(mill.broker)
    put(mill, 100)
    # then the queue grows at first, by what came since the worker left
    clock.advance(100)
    assert "the queue grows" in Visitor(mill).get("/queues/mail")
    clock.advance(43 * 60 - 100)
    text = Visitor(mill).get("/queues/mail")
    # then the rate is over all that time, and nobody knows whether the queue grows
    assert tile(text, "In")[0] == "2.33/min"
    assert "not counted lately" in text
    assert "the queue grows" not in text
    assert "grows" not in words(Visitor(mill).get("/queues"))
