"""Errors on PostgreSQL after the first commit of a call: the committed part is answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from postgres_desk import connect, ids, job, take

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.core.job import Outcome, State, Verdict
from tidemill.errors import BrokerUnavailable

pytestmark = pytest.mark.usefixtures("worker")


@contextmanager
def broken(url: str, schema: str, name: str) -> Iterator[None]:
    """One of the server's functions fails, as on a full disk."""
    with connect(url, autocommit=True) as conn:
        query = f"SELECT pg_get_functiondef('{schema}.{name}'::regproc)"
        row = conn.execute(query.encode()).fetchone()
        fails = "\nBEGIN\nRAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = 'no space left';\n"
        assert "\nBEGIN\n" in row[0]
        conn.execute(row[0].replace("\nBEGIN\n", fails, 1).encode())
        try:
            yield
        finally:
            conn.execute(row[0].encode())


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


def test_a_step_that_fails_as_it_looks_again_is_answered_by_the_next(
    broker: Broker, url: str, schema: str
) -> None:
    # law 4: its verdicts count, and are told to
    broker.put([job(id="a")])
    [lease] = take(broker, "w")
    step = Step("w", [Verdict(lease.token, Outcome.SUCCESS)], want=Want(1))
    with broken(url, schema, "look_again"), pytest.raises(BrokerUnavailable, match="no space left"):
        broker.exchange(step)
    record = broker.get("a")
    assert record.state is State.SUCCEEDED
    assert broker.exchange(step).settled == [True]
