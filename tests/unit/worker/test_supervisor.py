"""The supervisor when a step fails: no reply and no verdict is lost."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
from harness import LIMIT, eventually
from moved_clock import MovedClock

from tidemill import State, StoreFull, Tidemill, current_job
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.errors import BrokerUnavailable
from tidemill.testing import run_all, worker
from tidemill.worker.settings import Settings
from tidemill.worker.supervisor import Supervisor


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_WAITS", '{"retry": 0.01}')


def test_a_burst_does_not_take_a_broker_that_is_away_for_an_empty_one(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, away = mill.broker.exchange, [BrokerUnavailable("gone"), StoreFull("full")]

    def flaky(step: Step) -> Reply:
        if step.want is not None and step.want.count and away:
            raise away.pop()
        return exchange(step)

    job = mill.task(len).enqueue("abc")
    monkeypatch.setattr(mill.broker, "exchange", flaky)
    run_all(mill)
    assert not away
    assert job.state is State.SUCCEEDED


def test_a_burst_looks_less_and_less_often_for_jobs_on_their_way(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, empty = mill.broker.exchange, list[float]()

    def waiting(step: Step) -> Reply:
        reply, now = exchange(step), time.monotonic()
        if step.want is not None and not reply.leases:
            empty.append(now)
        reply.more = not empty or now <= empty[0] + 4
        return reply

    job = mill.task(len).enqueue("abc")
    monkeypatch.setattr(mill.broker, "exchange", waiting)
    run_all(mill)
    assert job.state is State.SUCCEEDED
    assert empty[-1] > empty[0] + 4
    assert len(empty) < 20


def test_a_cancellation_that_comes_with_a_verdict_of_its_own_step(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 14
    exchange, refused = mill.broker.exchange, []

    @mill.task
    def long() -> bool:
        job = current_job()
        until = time.monotonic() + LIMIT
        while job is not None and not job.cancelled and time.monotonic() < until:
            time.sleep(0.01)
        return time.monotonic() < until

    def full(step: Step) -> Reply:
        if step.verdicts and not refused:
            refused.append(step)
            running.cancel()
            raise StoreFull("full")
        return exchange(step)

    running: Any = long.enqueue()
    with worker(mill, concurrency=2):
        eventually(lambda: running.refresh().state is State.RUNNING, "a job that runs")
        monkeypatch.setattr(mill.broker, "exchange", full)
        assert mill.task(len).enqueue("abc").result(timeout=LIMIT) == 3
        assert running.result(timeout=LIMIT) is True


def test_the_last_verdict_is_offered_until_the_store_takes_it(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a store that refuses every verdict, as on a full disk
    exchange, refused, room = mill.broker.exchange, [], threading.Event()

    def full(step: Step) -> Reply:
        if step.verdicts and not room.is_set():
            refused.append(step)
            raise StoreFull("full")
        return exchange(step)

    monkeypatch.setattr(mill.broker, "exchange", full)
    # when a job ends while its worker stops, and the store has room again a while after
    job = mill.task(len).enqueue("abc")
    with worker(mill):
        eventually(lambda: refused, "a verdict")
        timer = threading.Timer(1.0, room.set)
        timer.start()
    timer.join()
    # then the verdict has been stored before the worker ended
    assert job.refresh().state.finished


def test_two_orders_to_stop_at_once_are_one_however_slow_the_stop_is(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case T11; given a supervisor that takes five seconds to pass an order on
    clock, ended = MovedClock(monkeypatch, speed=0.0), list[float]()
    worker = Supervisor(Settings(app=""), mill)
    monkeypatch.setattr(worker.pool, "be_quiet", lambda: clock.advance(5))
    monkeypatch.setattr(worker.pool, "end_all", lambda: ended.append(clock.machine()))
    try:
        # when two orders come at once, then nothing stops the worker now
        worker.signals.send(signal.SIGTERM)
        worker.signals.send(signal.SIGINT)
        worker._take_signals()
        assert ended == []
        # when another order comes later, then it does
        worker.signals.send(signal.SIGTERM)
        worker._take_signals()
        assert ended == [clock.machine()]
    finally:
        worker._watchdog.close()
        worker.pool.close()
        worker._folder.remove()
        worker.signals.close()
