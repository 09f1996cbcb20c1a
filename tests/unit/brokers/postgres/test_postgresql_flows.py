"""Flows on PostgreSQL: parents of one job that end at the same time, and deaths in between."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from postgres_desk import connect, deadlocks, until_blocked
from servers import Postgres

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope, Links
from tidemill.core.job import Outcome, Owner, State, Verdict
from tidemill.errors import JobNotFound

pytestmark = pytest.mark.full

WAITING, READY, SUCCEEDED = State.WAITING, State.READY, State.SUCCEEDED


@pytest.fixture
def url(server: Postgres) -> str:
    return f"{server.url()}?schema=t{new_id()}&migrate=1"


def job(job_id: str, *behind: str, waits: str = "", **fields: Any) -> Envelope:
    links = Links(next=behind, waits=waits, inputs=tuple(fields.pop("inputs", ())))
    return Envelope(id=job_id, task="t", links=links, **fields)


def together(*work: Callable[[], object]) -> None:
    """All of it, in threads that begin at once."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(work))

    def run(one: Callable[[], object]) -> None:
        gate.wait()
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def take(broker: Broker, owner: str, count: int) -> list[Any]:
    return list(broker.exchange(Step(owner, want=Want(count, sleep=False))).leases)


def settle(broker: Broker, owner: str, leases: Sequence[Any], outcome: Outcome) -> None:
    verdicts = [Verdict(lease.token, outcome) for lease in leases]
    assert all(broker.exchange(Step(owner, verdicts)).settled)


def states(broker: Broker) -> dict[str, State]:
    return {r.envelope.id: r.state for r in broker.find(Filter(), 10_000).records}


def recount(broker: Broker) -> None:
    """The counters, and what each waits for, are those of the records."""
    records = {r.envelope.id: r for r in broker.find(Filter(), 10_000).records}
    [row] = broker.stats()
    for state in (WAITING, State.SCHEDULED, READY, State.RUNNING):
        found = [r for r in records.values() if r.state is state]
        assert getattr(row, state.value) == len(found), state
    for record in records.values():
        before = [
            r for r in records.values() if record.envelope.id in (r.envelope.links or Links()).next
        ]
        if record.envelope.links and record.envelope.links.waits:
            unfinished = [r for r in before if not r.state.finished]
            bad = [r for r in before if r.state.finished and r.state is not SUCCEEDED]
            assert record.pending == len(unfinished), record.envelope.id
            assert record.failures == len(bad), record.envelope.id


@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.FAIL])
def test_two_that_end_the_last_two_before_one_do_not_lose_the_count(
    broker: Broker, server: Postgres, outcome: Outcome
) -> None:
    # law 3
    owners = ("w1", "w2")
    for owner in owners:
        broker.attach(Owner(id=owner, name=owner))
    for number in range(30):
        last, whole = f"z{number}", f"all{number}"
        broker.put(
            [
                job(last, waits="any"),
                job(whole, last, waits="barrier"),
                job(f"a{number}", whole),
                job(f"b{number}", whole),
            ]
        )
        [one], [two] = take(broker, "w1", 1), take(broker, "w2", 1)
        together(
            lambda one=one: settle(broker, "w1", [one], outcome),
            lambda two=two: settle(broker, "w2", [two], outcome),
        )
        [lease] = take(broker, "w1", 5)
        assert lease.open().id == last
        settle(broker, "w1", [lease], Outcome.SUCCESS)
    recount(broker)
    assert deadlocks(server) == ""


@pytest.mark.parametrize("seed", range(3))
def test_many_hands_on_one_net_of_jobs_never_wait_in_a_circle(
    broker: Broker, server: Postgres, seed: int
) -> None:
    """Batches that end jobs before the same others, in every order; and acts on them."""
    # laws 3, 14; case C4
    dice = random.Random(seed)
    names = [f"j{n:03}" for n in range(160)]  # the later ones come before
    jobs = []
    for place, name in enumerate(names):
        next_of = dice.sample(names[:place], min(place, dice.choice([0, 1, 2, 3])))
        waits = dice.choice(["success", "any", "failure", "barrier"]) if place < 120 else ""
        behind = [n for n in next_of if int(n[1:]) < 120]
        jobs.append(job(name, *behind, waits=waits))
    broker.put(jobs)
    owners = [f"w{n}" for n in range(4)]
    for owner in owners:
        broker.attach(Owner(id=owner, name=owner))

    def work(owner: str) -> None:
        own = random.Random(f"{seed}{owner}")
        for _ in itertools.count():
            leases = take(broker, owner, own.randint(1, 12))
            if not leases:
                return
            own.shuffle(leases)
            verdicts = [
                Verdict(lease.token, own.choice([Outcome.SUCCESS] * 5 + [Outcome.FAIL]))
                for lease in leases
            ]
            assert all(broker.exchange(Step(owner, verdicts)).settled)

    def act() -> None:
        own = random.Random(seed)
        for _ in range(25):
            broker.cancel(own.sample(names[:120], 3))
            broker.retry(own.sample(names, 3))

    together(*[lambda owner=owner: work(owner) for owner in owners], act)
    while any(not state.finished for state in states(broker).values()):
        work("w0")
    recount_failures(broker)
    assert deadlocks(server) == ""


def recount_failures(broker: Broker) -> None:
    records = broker.find(Filter(), 10_000).records
    assert all(r.pending == 0 for r in records)
    assert all(r.state.finished for r in records)


def test_members_put_while_others_end_are_all_counted(broker: Broker, server: Postgres) -> None:
    # law 3
    broker.put([job("end", waits="success"), job("whole", "end", waits="barrier")], hold=["whole"])
    for owner in ("w1", "w2"):
        broker.attach(Owner(id=owner, name=owner))
    done = threading.Event()

    def produce() -> None:
        for piece in range(20):
            broker.put([job(f"m{piece}-{n}", "whole") for n in range(10)])
        broker.put([], let_go=["whole"])
        done.set()

    def work(owner: str) -> None:
        while not done.is_set() or state_of(broker, "end") is WAITING:
            for lease in take(broker, owner, 7):
                settle(broker, owner, [lease], Outcome.SUCCESS)

    together(produce, lambda: work("w1"), lambda: work("w2"))
    for lease in take(broker, "w1", 9):
        settle(broker, "w1", [lease], Outcome.SUCCESS)
    assert state_of(broker, "whole") is SUCCEEDED
    recount(broker)
    assert deadlocks(server) == ""


def state_of(broker: Broker, job_id: str) -> State | None:
    record = broker.get(job_id)
    return record.state if record else None


def test_a_composition_in_the_callers_transaction(broker: Broker, url: str) -> None:
    # law 17
    net = [job("b", waits="success", inputs=("a",)), job("a", "b")]
    with connect(url) as conn:
        broker.put(net, txn=conn)
        assert states(broker) == {}
        conn.rollback()
        with pytest.raises(JobNotFound):
            broker.put([job("c", "nobody")], txn=conn)
        broker.put(net, txn=conn)  # the transaction goes on after what was refused
        conn.commit()
    assert states(broker) == {"a": READY, "b": WAITING}
    broker.attach(Owner(id="w"))
    settle(broker, "w", take(broker, "w", 5), Outcome.SUCCESS)
    [lease] = take(broker, "w", 5)
    assert [(i.id, i.state) for i in lease.inputs] == [("a", "succeeded")]


def test_a_session_that_ends_inside_a_settle_leaves_all_as_it_was(
    broker: Broker, url: str, server: Postgres
) -> None:
    # law 3
    broker.put([job("z", waits="any"), job("a", "z")])
    broker.attach(Owner(id="w"))
    [lease] = take(broker, "w", 1)
    with connect(url) as conn:  # holds what the settle wants
        schema = url.partition("schema=")[2].partition("&")[0]
        conn.execute(f"SELECT FROM {schema}.behind FOR UPDATE".encode())
        threads = [threading.Thread(target=lambda: settle(broker, "w", [lease], Outcome.SUCCESS))]
        threads[0].start()
        with connect(url, autocommit=True) as other:
            until_blocked(other, conn)
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE %s = ANY(pg_blocking_pids(pid))",
                [conn.info.backend_pid],
            )
            until_blocked(other, conn)  # it came again
        assert states(broker) == {"a": State.RUNNING, "z": WAITING}
        conn.rollback()
    threads[0].join(60)
    assert states(broker) == {"a": SUCCEEDED, "z": READY}
    recount(broker)
