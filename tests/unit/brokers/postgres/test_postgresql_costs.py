"""The number of rows that one transaction on PostgreSQL touches is bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from postgres_desk import job
from servers import postgres_url

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.postgres import limits
from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.postgres.timed_connection import Connection
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import State
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.core.owner import Owner

LATER = 60.0
PIECE = 400
ONE, TWO = LimitSettings(concurrency=1), LimitSettings(concurrency=2)

_TOUCHED = (
    "SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0)::bigint "
    "FROM pg_stat_xact_user_tables WHERE schemaname = %s"
)


class Counted:
    """A broker, and the most rows that one transaction of a call has touched."""

    def __init__(self, broker: PostgresBroker) -> None:
        self.broker = broker
        self._most = 0
        self._session = broker._session
        self._run = self._session.connections.run

    def cost(self, call: Callable[[PostgresBroker], object], patch: pytest.MonkeyPatch) -> int:
        """Of the largest transaction of a call."""
        self._most = 0
        with patch.context() as inner:
            inner.setattr(self._session.connections, "run", self._counted)
            inner.setattr(limits, "_empty_inbox", lambda _: self._open())
            call(self.broker)
        return self._most

    def _counted(self, work: Callable[[Any, Connection], Any], **options: Any) -> Any:
        def counting(line: Any, conn: Connection) -> Any:
            with conn.transaction():
                before = self._touched(conn)
                result = work(line, conn)
                self._most = max(self._most, self._touched(conn) - before)
            return result

        return self._run(counting, **options)

    def _touched(self, conn: Connection) -> int:
        row = conn.execute(_TOUCHED, [self._session.address.schema]).fetchone()
        assert row is not None
        return int(row[0])

    def _open(self) -> bool:
        """As the procedure open_gates does, whose commits cannot be counted."""
        while self._session.call("open_once", [], ""):
            pass
        return False


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Counted]]:
    opened: list[PostgresBroker] = []

    def make() -> Counted:
        # with such a lease nobody looks without being told for 30 s
        options = "migrate=1&patience=60&owner_lease=300"
        broker = open_broker(f"{postgres_url()}?schema=t{new_id()}&{options}")
        assert isinstance(broker, PostgresBroker)
        opened.append(broker)
        broker.attach(Owner(id="w", name="w"))
        return Counted(broker)

    yield make
    for broker in opened:
        broker.close()


def put(broker: PostgresBroker, count: int, prefix: str = "other", **fields: Any) -> None:
    broker.put([job(id=f"{prefix}{n:05}", **fields) for n in range(count)])


def put_keyed(
    broker: PostgresBroker, count: int, terms: LimitSettings = ONE, prefix: str = "k", **fields: Any
) -> None:
    claims = [JobLimit("api", f"k{n:05}", 1.0, terms) for n in range(count)]
    broker.put([job(id=f"{prefix}{n:05}", limit=c, **fields) for n, c in enumerate(claims)])


def take(broker: PostgresBroker, count: int, *queues: str) -> list[str]:
    leases = broker.exchange(Step("w", want=Want(count, queues))).leases
    return [lease.open().id for lease in leases]


def scheduled_here(broker: PostgresBroker, count: int) -> None:
    put(broker, count, delay=LATER, queue="mine")


def ready_here(broker: PostgresBroker, count: int) -> None:
    put(broker, count, queue="mine")


def keyed_here(broker: PostgresBroker, count: int) -> None:
    put_keyed(broker, count, queue="mine")


def cancel_some(prefix: str) -> Callable[[PostgresBroker], None]:
    ids = [f"{prefix}{n:05}" for n in range(500)]

    def act(broker: PostgresBroker) -> None:
        assert all(broker.cancel(ids, purge="p1"))

    return act


CASES: dict[str, tuple[Callable[[PostgresBroker, int], None], Callable[[PostgresBroker], Any]]] = {
    "a purge of scheduled jobs": (scheduled_here, cancel_some("other")),
    "a purge of ready jobs": (ready_here, cancel_some("other")),
    "a purge of jobs under a limit": (keyed_here, cancel_some("k")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_transaction_touches_no_more_in_a_larger_store(
    make: Callable[[], Counted], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    # given a store, and one three times as large
    fill, call = CASES[case]
    costs = []
    for count in (1600, 4800):
        counted = make()
        fill(counted.broker, count)
        # when the same is done in each
        costs.append(counted.cost(call, monkeypatch))
    # then the largest transaction is as large
    assert 0 < costs[1] <= 1.15 * costs[0], costs


@pytest.mark.parametrize("change", ["by hand", "by a put"])
def test_other_terms_reach_every_key(make: Callable[[], Counted], change: str) -> None:
    # given many keys that are at their limit, and jobs that wait for the last of these
    broker = make().broker
    put_keyed(broker, 3000)
    assert sum(len(take(broker, 500)) for _ in range(6)) == 3000
    late = [JobLimit("api", f"k{n:05}", 1.0, ONE) for n in range(2990, 3000)]
    broker.put([job(limit=claim) for claim in late])
    # given a worker that sleeps
    reply = broker.exchange(Step("w", want=Want(500)))
    assert reply.leases == []
    # when two may run at a time
    if change == "by hand":
        broker.set_limit("api", TWO)
    else:
        broker.put([job(limit=JobLimit("api", "other", 1.0, TWO))])
    # then it wakes, and all start
    started, wanted = 0, len(late) + (change == "by a put")
    begun = time.monotonic()
    while started < wanted:
        broker.wait("w", min(60.0, reply.next_due))
        reply = broker.exchange(Step("w", want=Want(500)))
        started += len(reply.leases)
        assert time.monotonic() < begun + 25, started
    [row] = broker.limits()
    assert (row.running, row.terms.concurrency) == (3000 + wanted, 2)


def test_a_key_has_its_tokens_when_other_terms_reach_it(make: Callable[[], Counted]) -> None:
    # given keys that have used all tokens of an hour
    broker = make().broker
    few = LimitSettings(rate=(1, 3600.0), burst=1)
    for prefix in ("a", "b"):
        put_keyed(broker, 700, few, prefix)
    assert len(take(broker, 1000)) == 700
    # when a longer burst is allowed, and then less again
    broker.set_limit("api", LimitSettings(rate=(1, 3600.0), burst=2))
    broker.set_limit("api", LimitSettings(rate=(1, 1800.0), burst=1))
    # then none has a token, and all have to wait for the new rate
    assert take(broker, 1000) == []
    held = broker.held("b00699")
    assert held is not None
    assert 1700 < held.until <= 1801
    assert broker.get("b00699").state is State.READY  # type: ignore[union-attr]
