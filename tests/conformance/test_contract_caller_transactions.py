"""Acknowledgements inside a transaction of the caller's, beside the caller's own rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from broker_driver import LiveOwner
from kinds import Clock, Kind

from tidemill import Message, Tidemill
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.errors import FeatureMissing, InvalidOption, LeaseLost

TTR = 60.0


class Rows:
    """The caller's rows, in the database of the store."""

    def __init__(self, kind: Kind, folder: Path, mill: Tidemill) -> None:
        self.name = kind.name.partition("+")[0]
        self.url = kind.store_url(folder).partition("?")[0]
        if self.name == "lmdb":
            self.env = mill.runtime.broker._store.env  # type: ignore[attr-defined]
        else:
            with self.transaction() as txn, txn.cursor() as cursor:
                cursor.execute("CREATE TABLE IF NOT EXISTS mine (name VARCHAR(20))")

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """A transaction that commits at the end of the block; an exception rolls it back."""
        if self.name == "lmdb":
            return self.env.begin(write=True)
        return self._of_django() if self.name == "django" else psycopg.connect(self.url)

    @contextlib.contextmanager
    def _of_django(self) -> Iterator[Any]:
        from django.db import connections, transaction

        alias = self.url.removeprefix("django://")
        with transaction.atomic(using=alias):
            yield connections[alias]

    def add(self, txn: Any, name: str) -> None:
        if self.name == "lmdb":
            txn.put(b"mine" + name.encode(), b"")
            return
        with txn.cursor() as cursor:
            cursor.execute("INSERT INTO mine VALUES (%s)", [name])

    def has(self, name: str) -> bool:
        with self.transaction() as txn:
            if self.name == "lmdb":
                return txn.get(b"mine" + name.encode()) is not None
            with txn.cursor() as cursor:
                cursor.execute("SELECT 1 FROM mine WHERE name = %s", [name])
                return cursor.fetchone() is not None


@pytest.fixture
def rows(kind: Kind, tmp_path: Path, mill: Tidemill) -> Rows:
    return Rows(kind, tmp_path, mill)


def put_and_get(mill: Tidemill, **options: Any) -> Message:
    mill.queue("q").put("body", ttr=TTR, **options)
    return mill.queue("q").get(30)


class Refused(Exception):
    pass


@pytest.mark.needs(Feature.TRANSACTIONS)
def test_rows_and_their_acknowledgement_are_one_commit(
    mill: Tidemill, rows: Rows, broker: Broker, clock: Clock
) -> None:
    # law 17
    with put_and_get(mill, key="k") as message, rows.transaction() as txn:
        rows.add(txn, "row")
        assert message.ack(txn=txn)
    assert rows.has("row")
    clock.advance(TTR + 1)
    assert mill.queue("q").get(0) is None
    assert broker.get(message.id) is None  # type: ignore[attr-defined]
    assert put_and_get(mill, key="k").attempt == 1


@pytest.mark.needs(Feature.TRANSACTIONS)
def test_a_message_stays_leased_after_a_rollback_until_its_ttr_is_over(
    mill: Tidemill, rows: Rows, clock: Clock
) -> None:
    # law 17
    message = put_and_get(mill)

    def fail() -> None:
        with message, rows.transaction() as txn:
            rows.add(txn, "row")
            message.ack(txn=txn)
            raise Refused

    with pytest.raises(Refused):
        fail()
    assert not rows.has("row")
    assert mill.queue("q").get(0) is None
    clock.advance(TTR + 1)
    again = mill.queue("q").get(30)
    assert (again.id, again.attempt) == (message.id, 2)


@pytest.mark.needs(Feature.TRANSACTIONS)
def test_a_message_is_settled_after_a_rollback(mill: Tidemill, rows: Rows) -> None:
    message = put_and_get(mill)
    for _ in range(2):
        with contextlib.suppress(Refused), rows.transaction() as txn:
            message.ack(txn=txn)
            raise Refused
    assert message.release()
    again = mill.queue("q").get(30)
    with rows.transaction() as txn:
        assert again.ack(txn=txn)
    assert mill.queue("q").get(0) is None


@pytest.mark.needs(Feature.TRANSACTIONS)
def test_a_transaction_is_rolled_back_when_the_lease_was_lost(
    mill: Tidemill, rows: Rows, broker: Broker, clock: Clock
) -> None:
    # law 17
    late = put_and_get(mill)
    clock.advance(TTR + 1)

    def work() -> None:
        with rows.transaction() as txn:
            rows.add(txn, "row")
            late.ack(txn=txn)

    with pytest.raises(LeaseLost, match="Roll your transaction back"):
        work()
    assert not rows.has("row")
    other = LiveOwner(broker, "c2", "consumer")
    [lease] = other.await_all(1)
    with pytest.raises(LeaseLost):
        work()
    assert not rows.has("row")
    assert other.settle(lease)


@pytest.mark.needs(Feature.TRANSACTIONS)
def test_a_consumer_that_is_killed_after_the_commit_leaves_nothing(
    mill: Tidemill, rows: Rows, broker: Broker
) -> None:
    # law 17
    message = put_and_get(mill)
    with rows.transaction() as txn:
        rows.add(txn, "row")
        message.ack(txn=txn)
    # a second acknowledgement changes nothing
    assert not message.ack()
    # when the consumer is dead
    assert broker.release(message._owner, None) == 0
    # then
    assert rows.has("row")
    assert LiveOwner(broker, "c2", "consumer").take() == []


@pytest.mark.needs(Feature.TRANSACTIONS)
def test_an_acknowledgement_needs_an_open_transaction(mill: Tidemill, rows: Rows) -> None:
    # case Q17
    message = put_and_get(mill)
    with pytest.raises(InvalidOption, match="txn"):
        message.ack(txn=object())
    assert message.ack()


def test_a_store_without_transactions_says_what_to_do_instead(mill: Tidemill) -> None:
    if Feature.TRANSACTIONS in mill.runtime.broker.features:
        pytest.skip("the store has transactions")
    message = put_and_get(mill)
    with pytest.raises(FeatureMissing) as refused:
        message.ack(txn=object())
    assert "; commit your rows first, then call ack()" in str(refused.value)
    assert message.ack()


@pytest.mark.needs(Feature.TRANSACTIONS)
def test_a_message_that_was_acknowledged_at_its_delivery_rolls_nothing_back(
    mill: Tidemill, rows: Rows
) -> None:
    mill.queue("q").put("body", ttr=0)
    message = mill.queue("q").get(30)
    assert message is not None
    with message, rows.transaction() as txn:
        rows.add(txn, "row")
        assert not message.ack(txn=txn)
    assert rows.has("row")
