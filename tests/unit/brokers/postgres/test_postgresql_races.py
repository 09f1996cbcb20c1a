"""Steps, acts and puts on PostgreSQL that meet at one job: counted once, without a deadlock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from moved_clock import MovedClock
from postgres_desk import connect, deadlocks, take, until_blocked
from servers import Postgres

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope, Links
from tidemill.core.job import Conflict, Outcome, Owner, State, Verdict

pytestmark = pytest.mark.usefixtures("worker")


@pytest.fixture
def url(server: Postgres, schema: str) -> str:
    return f"{server.url()}?schema={schema}&migrate=1"


def job(job_id: str, *behind: str, waits: str = "", **fields: Any) -> Envelope:
    links = Links(next=behind, waits=waits) if behind or waits else None
    return Envelope(id=job_id, task="t", links=links, **fields)


def stands(broker: Broker, job_id: str) -> tuple[State, int]:
    """Its state, and how many it waits for."""
    record = broker.get(job_id)
    return record.state, record.pending


@contextmanager
def behind_a_lock(url: str, schema: str, child: str, work: Any) -> Iterator[None]:
    """Have some work wait, in a thread, for what somebody does with the row of a waiting job."""
    with connect(url) as holder, connect(url, autocommit=True) as looker:
        holder.execute(f"SELECT FROM {schema}.behind WHERE id = '{child}' FOR UPDATE".encode())
        thread = threading.Thread(target=work)
        thread.start()
        until_blocked(looker, holder)
        yield
        holder.rollback()
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("waits", ["any", "barrier"])
def test_a_job_that_expires_during_a_step_is_counted_down_once(
    broker: Broker, moved_clock: MovedClock, waits: str
) -> None:
    # law 3
    first = job("a", "c", expires=5.0)
    broker.put([job("c", waits=waits), first, job("b", "c", delay=1000.0)])
    moved_clock.advance(10.0)
    broker.exchange(Step("w"))
    assert stands(broker, "a") == (State.EXPIRED, 0)
    assert stands(broker, "c") == (State.WAITING, 1)
    record = broker.get("c")
    assert record.failures == 1


def test_a_job_that_comes_due_after_the_look_is_not_ended_uncounted(
    broker: Broker, url: str, schema: str, moved_clock: MovedClock
) -> None:
    # law 3: a transaction of a user's brings it while those seen are being locked
    broker.put([job("c", waits="any"), job("a", "c", expires=5.0)])
    with connect(url) as user:
        broker.put([job("c2", waits="any"), job("e", "c2", expires=5.0)], txn=user)
        moved_clock.advance(10.0)
        with behind_a_lock(url, schema, "c", broker.tick):
            user.commit()
    broker.tick()
    assert [stands(broker, n)[0] for n in ("a", "e")] == [State.EXPIRED] * 2
    assert [stands(broker, n) for n in ("c", "c2")] == [(State.READY, 0)] * 2


@pytest.mark.parametrize("act", ["cancel", "delete"])
def test_an_act_leaves_a_job_alone_that_came_after_it_looked(
    broker: Broker, url: str, schema: str, act: str
) -> None:
    # law 3: else what is behind it would wait for ever
    broker.put([job("c", waits="any"), job("a", "c", delay=50.0)])
    broker.put([job("c2", waits="any")], hold=["c2"])
    done: list[bool] = []

    def work() -> None:
        done.extend(getattr(broker, act)(["a", "a2"]))

    with behind_a_lock(url, schema, "c", work):
        broker.put([job("a2", "c2", delay=50.0)], let_go=["c2"])
    assert done == [True, False]
    assert stands(broker, "a2") == (State.SCHEDULED, 0)
    assert stands(broker, "c2") == (State.WAITING, 1)
    assert getattr(broker, act)(["a2"]) == [True]
    assert stands(broker, "c2") == (State.READY, 0)


def test_a_purge_does_not_count_down_behind_a_job_that_was_just_leased(
    broker: Broker, url: str, schema: str
) -> None:
    # law 3
    broker.put([job("c", waits="any", queue="other"), job("a", "c", queue="q")])
    purged: list[int] = []

    def work() -> None:
        purged.append(delete_waiting(broker, "q"))

    with behind_a_lock(url, schema, "c", work):  # it has looked
        [lease] = take(broker, "w")
        assert lease.open().id == "a"
    assert purged == [0]
    assert stands(broker, "c") == (State.WAITING, 1)
    broker.exchange(Step("w", [Verdict(lease.token, Outcome.SUCCESS)]))
    assert stands(broker, "c") == (State.READY, 0)


@pytest.mark.parametrize("kind", ["worker", "consumer"])
def test_puts_that_replace_and_steps_that_settle_never_wait_in_a_circle(
    broker: Broker, server: Postgres, kind: str
) -> None:
    owners = ("w1", "w2")
    for owner in owners:
        broker.attach(Owner(id=owner, name=owner, kind=kind))
    over = threading.Event()
    errors: list[BaseException] = []

    def guarded(work: Any, *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            errors.append(error)

    def produce(keys: tuple[str, ...]) -> None:
        for _ in range(150):
            fields: dict[str, Any] = {"on_conflict": Conflict.REPLACE}
            fields |= {"task": "t"} if kind == "worker" else {"task": "", "ttr": 0.0}
            broker.put([Envelope(id=new_id(), key=key, **fields) for key in keys])

    def work(owner: str) -> None:
        tasks = kind == "worker"
        want = Want(5, sleep=False, tasks=tasks, messages=not tasks)
        leases: list[Any] = []
        while not over.is_set() or leases:
            verdicts = [Verdict(lease.token, Outcome.SUCCESS) for lease in leases]
            leases = list(broker.exchange(Step(owner, verdicts, want=want)).leases)

    producers = [
        threading.Thread(target=guarded, args=(produce, keys))
        for keys in (("k1", "k2"), ("k2", "k1"))
    ]
    workers = [threading.Thread(target=guarded, args=(work, owner)) for owner in owners]
    for thread in [*producers, *workers]:
        thread.start()
    for thread in producers:
        thread.join(120)
    over.set()
    for thread in workers:
        thread.join(60)
    assert errors == []
    assert deadlocks(server) == ""
