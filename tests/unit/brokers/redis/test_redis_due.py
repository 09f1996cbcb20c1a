"""Thousands of due jobs on Redis: no call moves all of them, and no caller notices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from moved_clock import MovedClock
from servers import redis_url

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.connections import ServerConnection
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import State
from tidemill.core.owner import Owner

MANY = 1250  # more than two calls move
LATER = 60.0


@pytest.fixture
def broker() -> Iterator[RedisBroker]:
    broker = open_broker(f"{redis_url()}?prefix=t{new_id()}")
    assert isinstance(broker, RedisBroker)
    yield broker
    broker.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each verb was called from now on."""
    counted: Counter[str] = Counter()
    run = ServerConnection.run

    def count(self: ServerConnection, verb: str, *args: object) -> object:
        counted[verb] += 1
        return run(self, verb, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ServerConnection, "run", count)
    return counted


def job(job_id: str, **fields: object) -> Envelope:
    return Envelope(id=job_id, task="t", **fields)  # type: ignore[arg-type]


def many(**fields: object) -> list[Envelope]:
    return [job(f"j{n:05}", **fields) for n in range(MANY)]


def put(broker: RedisBroker) -> object:
    return broker.put([job("new", key="k", on_conflict="reject")])


def schedule(broker: RedisBroker) -> object:
    return broker.change_schedules([Change("s", 0, time.time() + 99, b"", False, (job("new"),))])


def wait(broker: RedisBroker) -> object:
    return broker.wait_for(["j00000"], 0.01)


@pytest.mark.parametrize("call", [put, schedule, wait])
def test_due_jobs_are_moved_before_a_call_and_not_by_it(
    broker: RedisBroker,
    calls: Counter[str],
    moved_clock: MovedClock,
    call: Callable[[RedisBroker], object],
) -> None:
    # law 10
    broker.put(many(delay=LATER))
    moved_clock.advance(LATER + 1)
    calls.clear()
    call(broker)
    assert calls["housekeeping"] == 2
    (row,) = broker.stats()
    assert (row.scheduled, row.ready) == (0, MANY + (call is not wait))


def test_a_due_job_goes_before_jobs_put_after_it(
    broker: RedisBroker, moved_clock: MovedClock
) -> None:
    # law 10
    broker.put(many(delay=LATER))
    moved_clock.advance(LATER + 1)
    broker.put([job("new", key="k")])
    broker.attach(Owner(id="w", kind="worker", name="w"))
    leases = broker.exchange(Step("w", want=Want(MANY + 1))).leases
    assert [lease.open().id for lease in leases] == [*(j.id for j in many()), "new"]


def test_a_step_does_not_end_all_expired_jobs_itself(
    broker: RedisBroker, calls: Counter[str], moved_clock: MovedClock
) -> None:
    # law 9: given more expired jobs in the line than one call moves
    broker.put([*many(expires=LATER), job("last")])
    broker.attach(Owner(id="w", kind="worker", name="w"))
    moved_clock.advance(LATER + 1)
    calls.clear()
    # when a step asks for one job
    (lease,) = broker.exchange(Step("w", want=Want(1))).leases
    # then other calls have ended those before it
    assert lease.open().id == "last"
    assert calls["housekeeping"] == 2


def test_expired_jobs_hold_no_key_however_many_there_are(
    broker: RedisBroker, moved_clock: MovedClock
) -> None:
    # law 12
    broker.put([*many(expires=LATER), job("old", expires=LATER + 0.5, key="k")])
    moved_clock.advance(LATER + 1)
    put(broker)
    records = broker.get_many(["old", "new"])
    assert [record and record.state for record in records] == [State.EXPIRED, State.READY]
