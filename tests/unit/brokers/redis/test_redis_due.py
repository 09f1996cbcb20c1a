"""Thousands of due jobs on Redis, more than one call moves: no caller notices."""

from __future__ import annotations

from moved_clock import MovedClock

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner, State

MANY = 1250  # more than two calls move
LATER = 60.0


def job(job_id: str, **fields: object) -> Envelope:
    return Envelope(id=job_id, task="t", **fields)  # type: ignore[arg-type]


def many(**fields: object) -> list[Envelope]:
    return [job(f"j{n:05}", **fields) for n in range(MANY)]


def put(broker: RedisBroker) -> object:
    return broker.put([job("new", key="k", on_conflict="reject")])


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


def test_expired_jobs_hold_no_key_however_many_there_are(
    broker: RedisBroker, moved_clock: MovedClock
) -> None:
    # law 12
    broker.put([*many(expires=LATER), job("old", expires=LATER + 0.5, key="k")])
    moved_clock.advance(LATER + 1)
    put(broker)
    records = broker.get_many(["old", "new"])
    assert [record and record.state for record in records] == [State.EXPIRED, State.READY]
