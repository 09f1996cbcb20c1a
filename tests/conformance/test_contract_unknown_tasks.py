"""Jobs of tasks that a worker does not know wait aside for a worker that does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from broker_driver import LiveOwner, everything, ids_of, job, state
from kinds import Clock

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Reply, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.contract.unknown_tasks import UnknownTask, with_unknown_tasks
from tidemill.core.job import Lease, Outcome, State, Verdict
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.core.owner import Owner

pytestmark = pytest.mark.needs(Feature.UNKNOWN)
ERROR = "no worker knows task 'b.work'"


@pytest.fixture
def knowing(broker: Broker) -> LiveOwner:
    """A worker that knows the task b.work."""
    return LiveOwner(broker, "b")


def put(broker: Broker, count: int = 1, prefix: str = "b", **fields: Any) -> list[str]:
    fields.setdefault("task", "b.work")
    jobs = [job(id=f"{prefix}{n}", **fields) for n in range(count)]
    broker.put(jobs)
    return ids_of(jobs)


def set_aside(worker: LiveOwner, count: int = 1, grace: float = 0.0, **want: Any) -> list[Lease]:
    """Lease jobs as a worker that does not know their task, and hand them back."""
    leases = worker.await_all(count, **want)
    verdicts = [Verdict(it.token, Outcome.UNKNOWN, delay=grace, error=ERROR) for it in leases]
    assert all(worker.exchange(verdicts=verdicts).settled)
    return leases


def ask(worker: LiveOwner, count: int = 10, knows: str = "b.work", **want: Any) -> list[str]:
    names = (knows,) if knows else ()
    found = Want(count, knows=names, **want)
    return [lease.open().id for lease in worker.take_all(found)]


def unknown_tasks(broker: Broker) -> list[UnknownTask]:
    return with_unknown_tasks(broker, "a test").unknown_tasks()


def test_a_job_of_an_unknown_task_waits_for_a_worker_that_knows_it(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner
) -> None:
    # case T2, law 7
    # given
    put(broker, 3)
    [lease, *_] = set_aside(worker, 3)
    # when: nobody who does not know the task gets the jobs
    assert ask(worker, knows="") == []
    record = broker.get("b0")
    # then
    assert record is not None
    assert record.unknown
    assert (record.state, record.attempt, record.error) == (State.SCHEDULED, 0, ERROR)
    assert (record.due, record.attempts) == (0.0, [])
    [shown] = unknown_tasks(broker)
    assert (shown.task, shown.queues, shown.count) == ("b.work", ["default"], 3)
    assert shown.oldest == pytest.approx(lease.open().created)
    assert ask(knowing, 2) == ["b0", "b1"]
    assert ask(knowing, 2) == ["b2"]
    assert unknown_tasks(broker) == []
    record = broker.get("b2")
    assert record is not None
    assert not record.unknown
    assert record.state is State.RUNNING


def test_a_worker_is_told_of_new_names_alone(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner
) -> None:
    put(broker)
    put(broker, prefix="c", task="c.work")

    def hear(told: int) -> Reply:
        return knowing.exchange(want=Want(0, told=told))

    assert hear(0).unknown == []
    set_aside(worker, 2)
    reply = hear(0)
    assert sorted(reply.unknown) == ["b.work", "c.work"]
    assert reply.told > 0
    again = hear(reply.told)
    assert (again.unknown, again.told) == ([], reply.told)
    assert hear(0).unknown == reply.unknown
    # when the last job of a name goes, the name goes, and comes back with a new number
    assert ask(knowing) == ["b0"]
    assert hear(0).unknown == ["c.work"]
    put(broker, prefix="again")
    set_aside(worker)
    assert hear(reply.told).unknown == ["b.work"]
    assert knowing.exchange(want=Want(0)).unknown == []  # who does not ask is told nothing


@pytest.mark.needs("exact turns")
def test_priority_and_sequence_hold_among_ready_jobs_and_jobs_set_aside(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner
) -> None:
    # given
    broker.put([job(id="old", task="b.work"), job(id="low", task="b.work", priority=-1)])
    set_aside(worker, 2)
    put(broker, 2, prefix="new", task="a.work")
    put(broker, prefix="urgent", task="a.work", priority=5)
    # then
    assert ask(knowing, 1) == ["urgent0"]
    assert ask(worker, 1, knows="") == ["new0"]  # the job that was not taken stays aside
    assert ask(knowing, 10) == ["old", "new1", "low"]


@pytest.mark.parametrize("mode", list(Mode))
def test_queues_have_their_order(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner, mode: Mode
) -> None:
    if mode is Mode.MERGED and Feature.MERGED not in broker.features:
        pytest.skip("no merged order")
    put(broker, 2, prefix="x", queue="x")
    put(broker, 2, prefix="y", queue="y")
    put(broker, 2, prefix="z", queue="z")
    set_aside(worker, 6)
    assert ask(knowing, 3, queues=("y", "x"), mode=Mode.STRICT) == ["y0", "y1", "x0"]
    assert sorted(ask(knowing, 3, mode=mode)) == ["x1", "z0", "z1"]


def test_a_paused_queue_keeps_its_jobs_aside(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner
) -> None:
    put(broker)
    set_aside(worker)
    broker.set_queue("default", paused=True)
    assert ask(knowing) == []
    broker.set_queue("default", paused=False)
    assert ask(knowing) == ["b0"]


def test_cancel_delete_kick_and_purge(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner
) -> None:
    put(broker, 6)
    put(broker, prefix="other", queue="other")
    set_aside(worker, 7)
    assert broker.cancel(["b0"]) == [True]
    assert broker.delete(["b1"]) == [True]
    assert broker.kick(["b2"]) == [True]
    assert state(broker, "b0") is State.CANCELLED
    assert broker.get("b1") is None
    assert state(broker, "b2") is State.READY
    assert ask(worker, knows="") == ["b2"]
    [shown] = unknown_tasks(broker)
    assert (shown.count, shown.queues) == (4, ["default", "other"])
    assert broker.purge("default") == 3
    assert ask(knowing) == ["other0"]
    assert unknown_tasks(broker) == []


def test_a_job_set_aside_expires(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner, clock: Clock
) -> None:
    put(broker, expires=50)
    set_aside(worker)
    clock.advance(60)
    knowing.exchange()
    assert state(broker, "b0") is State.EXPIRED
    assert ask(knowing) == []
    assert unknown_tasks(broker) == []


def test_a_grace_ends_a_job_that_is_still_set_aside(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner, clock: Clock
) -> None:
    # given: two with a grace, one of them taken in time, and one without
    put(broker, 3)
    leases = worker.await_all(3)
    graces = (100.0, 100.0, 0.0)
    verdicts = [
        Verdict(lease.token, Outcome.UNKNOWN, delay=grace, error=ERROR)
        for lease, grace in zip(leases, graces, strict=True)
    ]
    worker.exchange(verdicts=verdicts)
    record = broker.get("b0")
    assert record is not None
    assert record.due > time.time()
    assert ask(knowing, 1) == ["b0"]
    # when
    clock.advance(110)
    knowing.exchange()
    # then
    record = broker.get("b1")
    assert record is not None
    assert (record.state, record.error, record.attempt) == (State.FAILED, ERROR, 0)
    assert not record.unknown
    assert state(broker, "b0") is State.RUNNING
    assert ask(knowing) == ["b2"]


def test_a_job_cancelled_while_leased_is_not_set_aside(broker: Broker, worker: LiveOwner) -> None:
    put(broker)
    [lease] = worker.await_all(1)
    broker.cancel(["b0"])
    assert worker.settle(lease, Outcome.UNKNOWN, error=ERROR)
    assert state(broker, "b0") is State.CANCELLED
    assert unknown_tasks(broker) == []


def test_a_retry_goes_through_the_ready_line_again(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner
) -> None:
    put(broker)
    set_aside(worker)
    [lease] = knowing.await_all(1, knows=("b.work",))
    assert (lease.attempt, lease.losses) == (1, 0)
    assert knowing.settle(lease, Outcome.RETRY, error="no", started=time.time())
    [again] = worker.await_all(1)
    assert again.attempt == 2
    worker.settle(again, Outcome.UNKNOWN, error=ERROR)
    [lease] = knowing.await_all(1, knows=("b.work",))
    assert lease.attempt == 2


def test_tokens_of_limits_go_back_and_hold_for_jobs_set_aside(
    broker: Broker,
    worker: LiveOwner,
    knowing: LiveOwner,
    clock: Clock,
    need: Callable[[Feature], None],
) -> None:
    # given: one job at a time of each limit
    need(Feature.LIMITS)
    limit = JobLimit("one", "", 1.0, LimitSettings(concurrency=1))
    put(broker, 2, limit=limit)
    set_aside(worker)
    set_aside(worker)
    # then
    [lease] = knowing.await_all(1, knows=("b.work",))
    assert lease.open().id == "b0"
    assert ask(knowing) == []
    knowing.settle(lease)
    [lease] = knowing.await_all(1, knows=("b.work",))
    assert lease.open().id == "b1"


def test_a_rate_of_the_queue_holds(
    broker: Broker,
    worker: LiveOwner,
    knowing: LiveOwner,
    clock: Clock,
    need: Callable[[Feature], None],
) -> None:
    need(Feature.LIMITS)
    put(broker, 2)
    set_aside(worker, 2)
    with_limits(broker, "a test").set_limit("default", LimitSettings(rate=(0.01, 1)), queue=True)
    [lease] = knowing.await_all(1, knows=("b.work",))
    assert lease.open().id == "b0"
    assert ask(knowing) == []
    clock.advance(110)
    [lease] = knowing.await_all(1, knows=("b.work",))
    assert lease.open().id == "b1"


@pytest.mark.needs("a witness")
def test_a_suspect_set_aside_runs_alone(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner
) -> None:
    put(broker, 2)
    worker.await_all(2)
    broker.release(worker.id, None)
    other = LiveOwner(broker, "w2")
    for _ in range(2):  # suspects are leased one at a time
        set_aside(other)
    assert ask(knowing, alone=False) == []
    [lease] = knowing.await_all(1, knows=("b.work",))
    assert lease.losses == 1


def test_keys_hold_for_jobs_set_aside(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.KEYS)
    put(broker, key="k")
    set_aside(worker)
    [kept] = broker.put([job(id="next", task="b.work", key="k")])
    assert kept.id == "b0"
    [merged] = broker.put(
        [job(id="urgent", task="b.work", key="k", on_conflict="merge", priority=7)]
    )
    assert merged.id == "b0"  # to merge makes it ready: the next worker finds out again
    assert state(broker, "b0") is State.READY
    [replaced] = broker.put([job(id="new", task="b.work", key="k", on_conflict="replace")])
    assert replaced.id == "new"
    assert unknown_tasks(broker) == []
    [lease] = knowing.await_all(1, knows=("b.work",))
    assert lease.open().id == "new"


def test_an_owner_that_knows_the_task_is_woken(
    broker: Broker, worker: LiveOwner, knowing: LiveOwner
) -> None:
    # given: it sleeps, and has never heard of the task
    def sleep() -> None:
        while (reply := knowing.exchange(want=Want(1, knows=knows, told=told))).leases:
            pass
        assert reply.next_due > 20

    def wait() -> None:
        started = time.monotonic()
        knowing.broker.wait(knowing.id, 20)
        assert time.monotonic() - started < 10

    knows, told = tuple[str, ...](), 0
    busy = LiveOwner(broker, "busy")
    put(broker, 3)
    leases = busy.await_all(3)
    sleep()
    # when a first job of the task is set aside
    busy.settle(leases[0], Outcome.UNKNOWN, error=ERROR)
    wait()
    reply = knowing.exchange(want=Want(1, told=told))
    assert reply.unknown == ["b.work"]
    knows, told = ("b.work",), reply.told
    assert len(knowing.exchange(want=Want(1, knows=knows, told=told)).leases) == 1
    # and when another one is, of a task whose name it knows
    busy.settle(leases[1], Outcome.UNKNOWN, error=ERROR)
    reply = knowing.exchange(want=Want(1, knows=knows, told=told))
    assert [it.open().id for it in reply.leases] == ["b1"]
    sleep()
    busy.settle(leases[2], Outcome.UNKNOWN, error=ERROR)
    wait()
    assert ask(knowing) == ["b2"]


def test_many_names_are_told_in_parts(broker: Broker, worker: LiveOwner) -> None:
    count = 1100
    broker.put([job(id=f"n{n}", task=f"task.{n}") for n in range(count)])
    set_aside(worker, count)
    told, names = 0, list[str]()
    while part := worker.exchange(want=Want(0, told=told)):
        names += part.unknown
        if part.told == told:
            break
        told = part.told
    assert len(names) == len(set(names)) == count
    assert broker.purge("default") == count


def test_a_job_set_aside_arrives_ready_in_another_store(
    broker: Broker, worker: LiveOwner, open_store: Callable[..., Broker], need: Any
) -> None:
    need(Feature.MOVE)
    from tidemill.brokers.memory import MemoryBroker
    from tidemill.transfer.store_to_store import move

    put(broker)
    set_aside(worker)
    target = MemoryBroker("memory://there")
    move(broker, target)
    record = target.get("b0")
    assert record is not None
    assert not record.unknown
    assert (record.state, record.due, record.error) == (State.READY, 0.0, "")
    broker.stay()


def test_an_owner_elsewhere_gets_jobs_set_aside(
    broker: Broker, worker: LiveOwner, need: Callable[[Feature], None]
) -> None:
    need(Feature.REMOTE_OWNERS)
    put(broker)
    set_aside(worker)
    broker.attach(Owner(id="far", name="far", lease=30.0))
    reply = broker.exchange(step(1, Want(1, told=0)))
    assert reply.unknown == ["b.work"]
    reply = broker.exchange(step(2, Want(1, knows=("b.work",), told=reply.told)))
    assert [lease.open().id for lease in reply.leases] == ["b0"]
    again = broker.exchange(step(2, Want(1, knows=("b.work",), told=reply.told)))
    assert [lease.token for lease in again.leases] == [lease.token for lease in reply.leases]
    broker.release("far", {})


def step(serial: int, want: Want) -> Any:
    from tidemill.brokers.contract.exchange import Step

    return Step("far", want=want, serial=serial)


def test_the_filter_finds_jobs_set_aside(broker: Broker, worker: LiveOwner) -> None:
    put(broker, 2)
    set_aside(worker, 1)
    found = everything(broker, Filter(states=frozenset({State.SCHEDULED})))
    assert [record.unknown for record in found] == [True]
    assert [record.unknown for record in everything(broker)].count(True) == 1
