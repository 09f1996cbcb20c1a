"""Races of the direct hand-off on PostgreSQL; ``unit/brokers/test_handoff.py`` shows the rest."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from handoff_desk import Sleeper, count_steps, named, states
from postgres_desk import connect, until_blocked
from servers import Postgres, postgres_url

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Lease, Outcome, State, Verdict
from tidemill.errors import BrokerUnavailable, DuplicateJob

pytestmark = pytest.mark.full


READY, RUNNING = State.READY, State.RUNNING


def test_a_put_leases_to_a_worker_that_had_news_before_it_slept(broker: PostgresBroker) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    assert worker.take() == []  # a step at once, with a verdict that came during the last step
    broker.put([named("one")])
    assert states(broker, "one") == [RUNNING]


def test_a_step_that_asks_for_strays_asks_the_server(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, steps = Sleeper(broker), count_steps(broker, monkeypatch)
    worker.sleep()
    broker.put([named("one")])
    worker.hear()
    before = steps()
    [lease] = worker.exchange(want=Want(4), held=[])
    assert (lease.open().id, steps()) == ("one", before + 1)


def test_a_put_that_waits_for_another_put_of_its_id_holds_up_no_worker(
    broker: PostgresBroker, url: str
) -> None:
    # laws 5 and 14
    worker = Sleeper(broker)
    worker.sleep()
    with connect(url) as holder, connect(url, autocommit=True) as looker:
        broker.put([named("one")], txn=holder)
        second = threading.Thread(target=lambda: broker.put([named("one")]))
        second.start()
        until_blocked(looker, holder)
        assert worker.take() == []
        holder.rollback()
        second.join(60)
    assert broker.get("one") is not None


def test_a_hint_that_was_not_heard_costs_a_step_alone(broker: PostgresBroker) -> None:
    """The line that listens was broken, or the lease is too long to travel with the hint."""
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("long", body=b"x" * 6000)])
    assert states(broker, "long") == [RUNNING]
    assert worker.take() == ["long"]
    worker.sleep()
    broker.put([named("lost")])
    worker.attached.hand_off._arrived.clear()
    worker.attached.hand_off._turn = 0  # as if it were yet to arrive
    assert worker.take() == ["lost"]
    assert worker.take() == []


def test_a_lease_is_not_handed_out_twice_by_a_hint_that_comes_late(broker: PostgresBroker) -> None:
    # law 4
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    worker.hear()
    (late,) = worker.attached.hand_off._arrived
    worker.attached.hand_off._arrived.clear()
    assert worker.take() == ["one"]  # by a step
    worker.attached.hand_off.arrived(*late)
    assert worker.take() == []


def test_a_step_in_the_air_brings_what_was_handed_before_it(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply is lost; sent again, it brings the lease, and what had arrived no longer holds."""
    # law 4
    worker = Sleeper(broker)
    worker.sleep()
    run = broker._session.connections.run

    def lose(work: Any, **options: Any) -> Any:
        run(work, **options)
        raise BrokerUnavailable("the reply was lost")

    broker.put([named("one")])
    worker.hear()
    monkeypatch.setattr(broker._session.connections, "run", lose)
    with pytest.raises(BrokerUnavailable):
        worker.exchange(touch=[(1, 1.0)], want=Want(4))
    monkeypatch.undo()
    assert worker.take() == ["one"]
    assert worker.take() == []


def test_nothing_is_handed_over_past_a_job_that_is_ready(broker: PostgresBroker) -> None:
    # law 10
    worker = Sleeper(broker)
    worker.sleep(queues=["q", "r"])
    with connect(postgres_url()) as other:
        broker.put([named("first", queue="r")], txn=other)
    broker.put([named("second", queue="q")])
    assert states(broker, "first", "second") == [READY, READY]
    assert set(worker.take(queues=["q", "r"])) == {"first", "second"}


def test_a_put_whose_reply_was_lost_is_told_again(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ended between the put's commit and the hint."""
    # law 4
    worker = Sleeper(broker)
    worker.sleep()
    with broker._session.connections._changed:
        connection = broker._session.connections._free[-1]
    broker.put([named("one")])
    worker.hear()
    worker.attached.hand_off._arrived.clear()
    broker.wait("w", 0.0)  # nothing is left in its pipe
    connection.serial -= 1
    broker.put([named("one")])  # under its serial: not a duplicate
    assert select.select([worker.attached._pipe.fd], [], [], 20)[0]
    assert worker.take() == ["one"]


# -- started before it is on disk -----------------------------------------------------------------


@pytest.fixture(scope="module")
def forgetful() -> Iterator[Postgres]:
    """A server that writes nothing to disk by itself for seconds: killed, it has lost that."""
    server = Postgres("wal_writer_delay=10s", "bgwriter_delay=10s", "autovacuum=off")
    yield server
    server.close()


class Shop:
    """A store on it, with a sleeper, and whether puts wait for the disk."""

    def __init__(self, server: Postgres) -> None:
        self.server = server
        self.schema = f"t{new_id()}"
        broker = open_broker(f"{server.url()}?schema={self.schema}&migrate=1&patience=20")
        self.broker = broker
        self.worker = Sleeper(broker)
        text = server.run(f"SELECT prosrc FROM pg_proc WHERE oid = '{self.schema}.flush'::regproc")
        server.run(
            f"CREATE OR REPLACE FUNCTION {self.schema}.flush() RETURNS void LANGUAGE plpgsql AS "
            f"$x$ BEGIN IF pg_try_advisory_xact_lock(42) THEN {text}; END IF; END $x$"
        )
        self.broker.put([named("first")])
        assert self.worker.take() == ["first"]

    @contextlib.contextmanager
    def the_disk_is_slow(self) -> Iterator[None]:
        """What waits for the disk is answered at once, as if the server then died before it was."""
        with connect(self.server.url(), autocommit=True) as conn:
            conn.execute("SELECT pg_advisory_lock(42)")
            yield
            conn.execute("SELECT pg_advisory_unlock(42)")

    def hand_over(self, job_id: str) -> Lease:
        self.worker.sleep()
        self.broker.put([named(job_id)])
        self.worker.hear()
        (lease,) = self.worker.exchange(want=Want(4))
        assert lease.open().id == job_id
        return lease

    def crash(self) -> None:
        wake_ups = self.broker._session.wake_ups
        before = wake_ups.since
        self.server.kill()
        self.server.start()
        give_up = time.monotonic() + 20
        while wake_ups.since in (0.0, before):
            assert time.monotonic() < give_up
            time.sleep(0.01)


@pytest.fixture
def shop(forgetful: Postgres) -> Iterator[Shop]:
    shop = Shop(forgetful)
    yield shop
    shop.broker.close()


def test_an_answered_hand_over_is_on_disk(shop: Shop) -> None:
    # law 1
    for name in ("one", "two", "three"):  # by chance it may be there in any case
        lease = shop.hand_over(name)
        shop.crash()
        assert states(shop.broker, name) == [RUNNING]
        reply = shop.broker.exchange(Step("w", [Verdict(lease.token, Outcome.SUCCESS)]))
        assert reply.settled == [True]


def test_a_job_that_began_and_was_lost_settles_no_other(shop: Shop) -> None:
    # laws 3, 4
    for name in map(str, range(20)):  # by chance it may be there all the same
        shop.server.run("CHECKPOINT")  # numbers are logged ahead, some at a time
        with shop.the_disk_is_slow():
            lost = shop.hand_over(name)
        shop.crash()
        if states(shop.broker, name) == [None]:
            break
    # when others are put, the first of which would draw its number
    others = [shop.hand_over("other"), shop.hand_over(name)]
    # then
    assert lost.token not in [lease.token for lease in others]
    assert not shop.broker.exchange(Step("w", [Verdict(lost.token, Outcome.SUCCESS)])).settled[0]
    assert states(shop.broker, name, "other") == [RUNNING, RUNNING]


def test_a_duplicate_error_is_given_only_for_a_durable_job(shop: Shop) -> None:
    # laws 1, 11
    with shop.the_disk_is_slow():
        shop.hand_over("one")
    with pytest.raises(DuplicateJob):
        shop.broker.put([named("one")])
    shop.crash()
    assert states(shop.broker, "one") == [RUNNING]


def test_a_put_that_is_made_again_waits_for_the_disk(shop: Shop) -> None:
    # law 1
    with shop.broker._session.connections._changed:
        connection = shop.broker._session.connections._free[-1]
    with shop.the_disk_is_slow():
        shop.hand_over("one")
    connection.serial -= 1
    shop.broker.put([named("one")])
    shop.crash()
    assert states(shop.broker, "one") == [RUNNING]
