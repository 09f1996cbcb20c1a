"""A store whose ready jobs RabbitMQ brings, as its owners see it: refusals, losses, leftovers."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pika
import pytest
from harness import eventually
from servers import RabbitMQ, carried_url, rabbitmq_url

from tidemill import Tidemill
from tidemill.brokers.carrier.relay import LOOK_EVERY
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.errors import BrokerUnavailable, InvalidOption
from tidemill.core.job import Lease, Outcome, Record, State, Verdict
from tidemill.core.limit_settings import LimitSettings
from tidemill.core.owner import Owner
from tidemill.transfer.store_to_store import move

S = State


def envelope(**fields: Any) -> Envelope:
    return Envelope(task="math.copysign", **({"id": new_id()} | fields))


def seen(broker: Broker, job: Envelope) -> Record:
    record = broker.get(job.id)
    assert record is not None
    return record


def leased(
    broker: Broker, owner: str, found: int, *, alone: bool = True, count: int = 10
) -> list[Lease]:
    """What an owner is brought until it has so many; ``count`` are wanted at a time."""
    leases, until = list[Lease](), time.monotonic() + 60
    while len(leases) < found:
        assert time.monotonic() < until
        reply = broker.exchange(Step(owner, want=Want(count, alone=alone)))
        assert sum(lease.losses > 0 for lease in reply.leases) <= 1
        leases += reply.leases
        if not reply.leases:
            broker.wait(owner, min(1.0, reply.next_due))
    return leases


def test_a_job_that_cannot_be_carried_delays_no_other_job(tmp_path: Path) -> None:
    # law 16: too large for the server; of a queue that it cannot make; of one whose name cannot be
    server = RabbitMQ("max_message_size = 20000")
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id(), server.url)
    large, named = envelope(body=b"x" * 30_000), envelope(queue="all.#")
    taken, well = envelope(queue="taken"), [envelope() for _ in range(5)]
    try:
        with contextlib.closing(open_broker(url)) as broker:
            prefix = broker.carrier._settings.prefix  # type: ignore[attr-defined]
            with pika.BlockingConnection(pika.URLParameters(server.url)) as line:
                line.channel().queue_declare(f"{prefix}.tasks.normal.taken", durable=True)
            broker.put([large, named, taken, *well])
            broker.attach(Owner(id="w", kind="worker", name="w"))
            eventually(lambda: sum(row.carried for row in broker.stats()) == 5, "the others are")
            eventually(lambda: seen(broker, large).state is S.FAILED, "it failed")
            assert "message size 3" in seen(broker, large).error
            eventually(lambda: seen(broker, named).state is S.FAILED, "it failed")
            assert "RabbitMQ reads as a pattern" in seen(broker, named).error
            assert seen(broker, taken).state is not S.FAILED  # once somebody has seen to that
            assert {seen(broker, job).state for job in well} == {S.READY}
            broker.attach(Owner(id="later", kind="worker", name="later"))  # it serves all queues
            assert named.queue not in {row.name for row in broker.carrier.stats()}  # type: ignore[attr-defined]
    finally:
        server.close()


def test_two_stores_on_one_prefix_do_not_meet(tmp_path: Path) -> None:
    # laws 2, 4: a message of the other is neither dropped nor run
    name, ids = "t" + new_id(), list[str]()
    with contextlib.ExitStack() as stack:
        urls = [carried_url(f"lmdb://{tmp_path}/{n}", name) for n in range(2)]
        one, two = (stack.enter_context(contextlib.closing(open_broker(url))) for url in urls)
        jobs = [envelope() for _ in range(5)]
        one.put(jobs)
        one.attach(Owner(id="a", kind="worker", name="a"))
        eventually(lambda: sum(row.carried for row in one.stats()) == 5, "they are carried")
        two.attach(Owner(id="b", kind="worker", name="b"))
        two.put([envelope()])
        assert len(leased(two, "b", 1)) == 1
        ids = [lease.open().id for lease in leased(one, "a", 5)]
    assert sorted(ids) == sorted(job.id for job in jobs)


def test_an_owner_that_wants_both_gets_tasks_and_messages(tmp_path: Path) -> None:
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        broker.attach(Owner(id="w", kind="worker", name="w"))
        task, raw, leases = envelope(), Envelope(id=new_id(), body=b"raw"), list[Lease]()
        broker.put([raw, task])

        def take(count: int, **kinds: bool) -> list[str]:
            reply = broker.exchange(Step("w", want=Want(count, **kinds)))
            leases.extend(reply.leases)
            if not reply.leases:
                broker.wait("w", min(1.0, reply.next_due))
            return [lease.open().id for lease in leases]

        eventually(lambda: take(1, tasks=False, messages=True) == [raw.id], "the message alone")
        eventually(lambda: take(1) == [raw.id, task.id], "the task, which was left alone")
        # and both at once, as many as were asked for
        more = [envelope() if n % 2 else Envelope(id=new_id()) for n in range(8)]
        broker.put(more)
        for count in range(3, 11):
            eventually(lambda: len(take(1, messages=True)) == count, "one more")  # noqa: B023
        assert {lease.open().id for lease in leases[2:]} == {job.id for job in more}
        verdicts = [Verdict(lease.token, 0) for lease in leases]
        assert all(broker.exchange(Step("w", verdicts)).settled)


def test_a_busy_owner_is_brought_no_job_that_others_could_run(tmp_path: Path) -> None:
    # laws 9, 10, 13: and so it keeps no place of a limit with it, either
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        jobs = carry(broker, 8)
        mine = leased(broker, "w", 1, count=1)
        broker.attach(Owner(id="v", kind="worker", name="v"))
        theirs = [leased(broker, "v", 1, count=1)[0] for _ in range(7)]
        assert [lease.open().id for lease in [*mine, *theirs]] == [job.id for job in jobs]


def test_the_message_of_a_job_that_runs_for_long_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a server hands out anew what is not acknowledged for so long
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        carry(broker, 2)
        [lease] = leased(broker, "w", 1, count=1)
        held = broker.carrier._owners["w"]._held  # type: ignore[attr-defined]
        broker.exchange(Step("w", want=Want(0)))
        assert len(held) == 1
        monkeypatch.setattr("tidemill.brokers.carrier.worker._KEPT", 0.0)
        broker.exchange(Step("w", want=Want(0)))
        assert not held
        assert broker.exchange(Step("w", [Verdict(lease.token, Outcome.SUCCESS)])).settled == [True]


def test_a_worker_that_leaves_gives_no_message_back_whose_job_it_took(tmp_path: Path) -> None:
    # law 4: nobody could do anything with it
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        jobs = carry(broker, 3)
        leased(broker, "w", 3)
        broker.detach("w")
        assert sum(row.ready for row in broker.carrier.stats()) == 0  # type: ignore[attr-defined]
        broker.attach(Owner(id="v", kind="worker", name="v"))
        again = leased(broker, "v", 3)
        assert [lease.open().id for lease in again] == [job.id for job in jobs]


def test_jobs_that_were_lost_are_shared_by_the_workers(tmp_path: Path) -> None:
    # law 6: one at a time in each, and what a worker does not run lies with the carrier
    with contextlib.closing(
        open_broker(carried_url(f"lmdb://{tmp_path}/store", "t" + new_id()))
    ) as broker:
        jobs = [envelope() for _ in range(4)]
        broker.put(jobs)
        broker.attach(Owner(id="a", kind="worker", name="a"))
        leased(broker, "a", 4)
        broker.release("a", None)  # nobody saw what it ran
        broker.detach("a")
        for name in "bc":
            broker.attach(Owner(id=name, kind="worker", name=name))
        [first] = leased(broker, "b", 1)
        for _ in range(3):  # it has one, and wants others
            broker.exchange(Step("b", want=Want(10, alone=False)))
        others = leased(broker, "c", 3)
        assert {lease.open().id for lease in [first, *others]} == {job.id for job in jobs}
        assert {lease.losses for lease in [first, *others]} == {1}


def test_a_limit_holds_for_what_is_carried_already(tmp_path: Path) -> None:
    # law 13
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        broker.put([envelope() for _ in range(5)])
        broker.attach(Owner(id="w", kind="worker", name="w"))
        eventually(lambda: sum(row.carried for row in broker.stats()) == 5, "they are carried")
        limits = with_limits(broker, "limits")
        limits.set_limit("default", LimitSettings(rate=(2, 3600), burst=2), queue=True)
        leased(broker, "w", 2)
        for _ in range(5):
            broker.wait("w", 0.2)
            assert not broker.exchange(Step("w", want=Want(10))).leases
        assert broker.stats()[0].carried == 0
        limits.set_limit("default", LimitSettings(rate=(2, 3600), burst=2), queue=True)  # no other
        limits.set_limit("default", None, queue=True)
        leased(broker, "w", 3)


def test_a_look_that_fails_leaves_no_job_with_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 3: the store goes away when the relay has just leased jobs
    monkeypatch.setattr("tidemill.brokers.carrier.relay.LOOK_EVERY", 0.0)
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        stats, failed = broker.store.stats, list[str]()  # type: ignore[attr-defined]

        def away() -> list[Any]:
            rows = stats()
            asks = threading.current_thread().name
            if asks == "tidemill-relay" and not failed and any(row.running for row in rows):
                failed.append("once")
                raise BrokerUnavailable("the store is away")
            return rows

        monkeypatch.setattr(broker.store, "stats", away)  # type: ignore[attr-defined]
        carry(broker, 5)
        assert failed


@pytest.mark.parametrize("kind", ["worker", "consumer"])
def test_a_breaker_holds_back_what_is_carried_already(tmp_path: Path, kind: str) -> None:
    # law 13, case S6: whoever it was whose attempts failed
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        limits = with_limits(broker, "limits")
        limits.set_limit("default", LimitSettings(breaker=(3, 3600)), queue=True)
        raw = [Envelope(id=new_id(), body=b"raw") for _ in range(3)]
        broker.put(raw)
        jobs = carry(broker, 20)
        if kind == "worker":
            failing = leased(broker, "w", 3, count=3)
        else:
            broker.attach(Owner(id="c", kind="consumer", name="c"))
            want = Want(3, tasks=False, messages=True)
            failing = broker.exchange(Step("c", want=want)).leases
        broker.put([envelope(queue="other") for _ in range(2)])
        eventually(lambda: broker.stats()[1].carried == 2, "others are carried")
        owner = "w" if kind == "worker" else "c"
        for lease in failing:
            verdict = Verdict(lease.token, Outcome.RETRY, delay=60.0, started=1.0)
            assert broker.exchange(Step(owner, [verdict])).settled == [True]
        # then: nothing more of that queue starts, and what else was carried comes once more
        eventually(lambda: broker.stats()[0].carried == 0, "they are called back")
        assert {lease.open().queue for lease in leased(broker, "w", 2)} == {"other"}
        assert not broker.exchange(Step("w", want=Want(10))).leases
        assert [row.carried for row in broker.stats()] == [0, 0]
        held = limits.held(jobs[-1].id)
        assert held is not None
        assert held.broken


def test_jobs_lost_from_a_steady_stream_are_brought_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 1: what comes later arrives, so its queue is never seen empty for long
    monkeypatch.setattr("tidemill.brokers.carrier.relay.LOOK_EVERY", 0.2)
    monkeypatch.setattr("tidemill.brokers.carrier.relay.LOOKS", 1_000_000)
    monkeypatch.setattr("tidemill.brokers.carrier.relay.OVERTAKEN", 1.0)
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        lost = [envelope() for _ in range(3)]
        broker.put(lost)
        broker.attach(Owner(id="w", kind="worker", name="w"))
        eventually(lambda: sum(row.carried for row in broker.stats()) == 3, "they are carried")
        broker.carrier.purge("default")  # type: ignore[attr-defined]
        put, came, until = [job.id for job in lost], list[str](), time.monotonic() + 60
        while not set(put[:3]) <= set(came):
            assert time.monotonic() < until
            job = envelope()
            broker.put([job])
            put.append(job.id)
            came += [lease.open().id for lease in leased(broker, "w", 1)]
            time.sleep(0.02)
        # then each job has come once, and the carrier holds no job
        came += [lease.open().id for lease in leased(broker, "w", len(put) - len(came))]
        assert sorted(came) == sorted(put)
        assert sum(row.carried for row in broker.stats()) == 0


def test_a_job_that_was_lost_comes_alone_and_only_to_who_can_isolate_it(tmp_path: Path) -> None:
    # law 6
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with Tidemill(url, allow_imports=["*"]) as mill:
        broker = mill.broker
        jobs = [mill.enqueue("math.copysign", n, -1).id for n in range(2)]
        broker.attach(Owner(id="a", kind="worker", name="a"))
        leased(broker, "a", 2)
        broker.release("a", None)  # nobody saw what it ran
        broker.detach("a")
        jobs.append(mill.enqueue("math.copysign", 2, -1).id)
        broker.attach(Owner(id="b", kind="worker", name="b"))
        [whole] = leased(broker, "b", 1, alone=False)
        assert (whole.open().id, whole.losses) == (jobs[2], 0)
        lost = leased(broker, "b", 2)
        assert {lease.open().id for lease in lost} == set(jobs[:2])
        assert {lease.losses for lease in lost} == {1}


def test_jobs_that_the_carrier_lost_are_brought_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.brokers.carrier.relay.LOOK_EVERY", 0.2)
    monkeypatch.setattr("tidemill.brokers.carrier.relay.LOOK_AGAIN", 0.05)
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with Tidemill(url, allow_imports=["*"]) as mill:
        broker = mill.broker
        jobs = [mill.enqueue("math.copysign", n, -1) for n in range(5)]
        broker.attach(Owner(id="w", kind="worker", name="w"))
        eventually(lambda: sum(row.carried for row in mill.queues()) == 5, "they are carried")
        broker.carrier.purge("default")  # type: ignore[attr-defined]
        found: set[str] = set()
        until = time.monotonic() + 30
        while len(found) < 5:
            assert time.monotonic() < until
            broker.wait("w", 0.2)
            reply = broker.exchange(Step("w", want=Want(10)))
            found |= {lease.open().id for lease in reply.leases}
        assert found == {job.id for job in jobs}


def carry(broker: Broker, count: int) -> list[Envelope]:
    """Jobs that lie with the carrier, brought there for the worker ``w``."""
    jobs = [envelope() for _ in range(count)]
    broker.put(jobs)
    broker.attach(Owner(id="w", kind="worker", name="w"))
    eventually(lambda: sum(row.carried for row in broker.stats()) == count, "they are carried")
    return jobs


def test_a_store_moves_with_what_is_carried(tmp_path: Path) -> None:
    # law 3: all of it arrives, and what RabbitMQ still brings is stale
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(open_broker(url)))
        target = stack.enter_context(contextlib.closing(open_broker(f"lmdb://{tmp_path}/other")))
        jobs = carry(source, 5)
        assert move(source, target).done == 5
        reply = source.exchange(Step("w", want=Want(10)))
        assert reply.leases == []
        target.attach(Owner(id="v", kind="worker", name="v"))
        there = target.exchange(Step("v", want=Want(10))).leases
        assert [lease.open().id for lease in there] == [job.id for job in jobs]


def test_a_carried_store_moves_to_a_carrier_alone_and_on_to_another_store(tmp_path: Path) -> None:
    # law 3: nothing is left on the way but messages that were good for nothing, and they are gone
    urls = [carried_url(f"lmdb://{tmp_path}/{n}", "t" + new_id()) for n in range(2)]
    with contextlib.ExitStack() as stack:
        one, two, alone = (
            stack.enter_context(contextlib.closing(open_broker(url)))
            for url in (*urls, f"{rabbitmq_url()}?prefix=t{new_id()[-12:]}")
        )
        later, failed = envelope(delay=3600.0), envelope()
        one.put([later, failed])
        one.attach(Owner(id="f", kind="worker", name="f"))
        [lease] = leased(one, "f", 1)
        one.exchange(Step("f", [Verdict(lease.token, Outcome.FAIL, error="no")]))
        one.detach("f")
        jobs = carry(one, 5)
        assert move(one, alone).gone == 7
        eventually(lambda: not any(row.ready for row in one.carrier.stats()))  # type: ignore[attr-defined]
        assert move(alone, two).gone == 7
        assert [seen(two, job).state for job in (*jobs, later, failed)] == [
            *(S.READY for _ in jobs),
            S.SCHEDULED,
            S.FAILED,
        ]
        two.attach(Owner(id="v", kind="worker", name="v"))
        assert [lease.open().id for lease in leased(two, "v", 5)] == [job.id for job in jobs]
        with pytest.raises(InvalidOption, match="the same store"):
            move(two, stack.enter_context(contextlib.closing(open_broker(two.store.url))))  # type: ignore[attr-defined]


def test_a_move_that_is_called_off_has_all_brought_again(tmp_path: Path) -> None:
    # law 3: what lay with the carrier was thrown away when the store was sealed
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        jobs = carry(broker, 5)
        broker.depart("lmdb://elsewhere", seal=True)
        began = time.monotonic()
        broker.stay()
        found = {lease.open().id for lease in leased(broker, "w", 5)}
        assert found == {job.id for job in jobs}
        assert time.monotonic() - began < LOOK_EVERY  # and not when it was noticed


def test_a_forked_child_puts_and_leaves_the_parents_owners_alone(tmp_path: Path) -> None:
    url = carried_url(f"lmdb://{tmp_path}/store", "t" + new_id())
    with contextlib.closing(open_broker(url)) as broker:
        jobs = carry(broker, 2)
        child = os.fork()
        if not child:
            try:
                broker.put([envelope(id="the child's")])
                broker.close()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        found = {lease.open().id for lease in leased(broker, "w", 3)}
        assert found == {job.id for job in jobs} | {"the child's"}


def test_a_carried_store_is_closed_while_the_server_is_away(tmp_path: Path) -> None:
    server = RabbitMQ()
    try:
        broker = open_broker(carried_url(f"lmdb://{tmp_path}/store", "t" + new_id(), server.url))
        carry(broker, 2)
        server.kill()
        broker.put([envelope() for _ in range(3)])
        time.sleep(0.5)  # the relay has some in hand
        before = time.monotonic()
        broker.close()
        assert time.monotonic() - before < 60
    finally:
        server.close()
    assert not [t for t in threading.enumerate() if t.name == "tidemill-relay"]
    with contextlib.closing(open_broker(f"lmdb://{tmp_path}/store")) as store:
        [row] = store.stats()
        assert (row.ready, row.running, row.carried) == (5, 0, 2)
        assert store.recall() == 2
