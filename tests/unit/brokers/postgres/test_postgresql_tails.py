"""Errors on PostgreSQL after the first commit of a call: the committed part is answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from postgres_desk import connect, ids, job, take

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.schedules import Change
from tidemill.core.job import Outcome, State, Verdict
from tidemill.core.owner import Owner
from tidemill.errors import BrokerUnavailable


@pytest.fixture(autouse=True)
def worker(broker: Broker) -> None:
    broker.attach(Owner(id="w", name="w"))


@contextmanager
def broken(url: str, schema: str, name: str) -> Iterator[None]:
    """One of the server's functions fails, as on a full disk."""
    with connect(url, autocommit=True) as conn:
        query = f"SELECT pg_get_functiondef('{schema}.{name}'::regproc)"
        row = conn.execute(query.encode()).fetchone()
        assert row is not None
        fails = "\nBEGIN\nRAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = 'no space left';\n"
        assert "\nBEGIN\n" in row[0]
        conn.execute(row[0].replace("\nBEGIN\n", fails, 1).encode())
        try:
            yield
        finally:
            conn.execute(row[0].encode())


def test_a_tick_walks_over_no_nonces(broker: Broker, url: str, schema: str) -> None:
    """A server's producers leave one for each put, and they stay for ten minutes."""
    broker.put([job()])
    with connect(url, autocommit=True) as conn:
        conn.execute(f'SET search_path = "{schema}"'.encode())
        conn.execute(
            "INSERT INTO call (line, serial, seen, once) SELECT 'once ' || n, 1, s, s FROM "
            "generate_series(1, 5000) AS n CROSS JOIN LATERAL (SELECT "
            "extract(epoch FROM clock_timestamp()) - 601 * (n <= 10)::int) AS x (s)"
        )
        with conn.transaction():
            conn.execute("SELECT tick_once(100, '(0,1,1,1,1,30)'::prefs)")
            stats = conn.execute(
                "SELECT seq_tup_read, n_tup_del, idx_tup_fetch FROM pg_stat_xact_user_tables "
                "WHERE relid = 'call'::regclass"
            ).fetchone()
        assert stats is not None
        assert stats[:2] == (0, 10)
        assert stats[2] < 100


@pytest.mark.parametrize("name", ["ring", "prune", "sweep_keys"])
def test_telling_and_chores_may_fail_after_a_put_and_a_step(
    broker: Broker, url: str, schema: str, name: str
) -> None:
    # law 4
    broker.put([job(id="a"), job(id="b")])
    with broken(url, schema, name):
        broker._session._next_chores = 0.0  # type: ignore[attr-defined]
        broker.put([job(id="c"), job(id="d")])
        broker._session._next_chores = 0.0  # type: ignore[attr-defined]
        leases = take(broker, "w", 2)
        assert [lease.open().id for lease in leases] == ["a", "b"]
        broker._session._next_chores = 0.0  # type: ignore[attr-defined]
        verdicts = [Verdict(lease.token, Outcome.SUCCESS) for lease in leases]
        assert broker.exchange(Step("w", verdicts)).settled == [True, True]
    assert ids(broker) == {"a", "b", "c", "d"}


def test_a_tick_whose_telling_fails_has_ticked(broker: Broker, url: str, schema: str) -> None:
    with broken(url, schema, "ring"):
        broker.tick()


@pytest.mark.parametrize("name", ["ring", "fire_sooner"])
def test_telling_may_fail_after_a_change_of_schedules(
    broker: Broker, url: str, schema: str, name: str
) -> None:
    # law 4
    with broken(url, schema, name):
        change = Change("s", 0, 1e12, b"x", jobs=[job(id="fired")])
        [changed] = broker.change_schedules([change])
    assert changed.done
    assert ids(broker) == {"fired"}


def test_a_step_that_fails_as_it_looks_again_is_answered_by_the_next(
    broker: Broker, url: str, schema: str
) -> None:
    # law 4: its verdicts count, and are told to
    broker.put([job(id="a")])
    [lease] = take(broker, "w")
    step = Step("w", [Verdict(lease.token, Outcome.SUCCESS)], want=Want(1))
    with (
        broken(url, schema, "look_again"),
        pytest.raises(BrokerUnavailable, match="no space left"),
    ):
        broker.exchange(step)
    record = broker.get("a")
    assert record is not None
    assert record.state is State.SUCCEEDED
    assert broker.exchange(step).settled == [True]


def test_leases_come_although_schedules_cannot_be_handed_out(
    broker: Broker, url: str, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    # law 4
    broker.change_schedules([Change("s", 0, 1.0, b"x")])
    broker.put([job(id="a")])
    with broken(url, schema, "hand_out"):
        reply = broker.exchange(Step("w", want=Want(1), fires=5))
    assert [lease.open().id for lease in reply.leases] == ["a"]
    assert reply.schedules == []
    assert "not handed out" in caplog.text
