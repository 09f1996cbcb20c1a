"""Limits on PostgreSQL: steps that meet at a limiter, wake-ups, lost replies, kept state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from moved_clock import MovedClock
from postgres_desk import connect, take, until_blocked
from servers import Postgres

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings
from tidemill.core.job import Command, Lease, Outcome, Owner, State, Verdict

pytestmark = pytest.mark.full

HOWS = pytest.mark.parametrize("how", ["queue", "lane"])


@pytest.fixture
def url(server: Postgres, schema: str) -> str:
    # With such a lease nobody looks without being told for 30 s.
    return f"{server.url()}?schema={schema}&migrate=1&owner_lease=300"


@pytest.fixture
def broker(url: str) -> Iterator[PostgresBroker]:
    broker = open_broker(url)
    for owner in ("one", "two", "idle"):
        broker.attach(Owner(id=owner, name=owner))
    yield broker
    broker.close()


def limit(broker: PostgresBroker, how: str, terms: LimitSettings) -> dict[str, Any]:
    """Set it; what jobs under it have."""
    if how == "queue":
        broker.set_limit("default", terms, queue=True)
        return {}
    return {"limit": JobLimit("api", "k", 1.0, terms)}


def put(broker: PostgresBroker, count: int, prefix: str = "j", **fields: Any) -> list[str]:
    jobs = [Envelope(id=f"{prefix}{n:04}", task="t", **fields) for n in range(count)]
    broker.put(jobs)
    return [job.id for job in jobs]


def done(lease: Lease, outcome: Outcome = Outcome.SUCCESS) -> Verdict:
    return Verdict(lease.token, outcome, started=1.0, ended=2.0)


def names(leases: list[Lease]) -> list[str]:
    return [lease.open().id for lease in leases]


def running(broker: PostgresBroker) -> list[str]:
    states = frozenset({State.RUNNING})
    return sorted(r.envelope.id for r in broker.find(Filter(states=states)).records)


def is_woken(broker: PostgresBroker, owner: str = "idle") -> bool:
    begun = time.monotonic()
    broker.wait(owner, 60)
    return time.monotonic() - begun < 20


def falls_asleep(broker: PostgresBroker, owner: str = "idle") -> None:
    """It has looked, and heard of all there was."""
    for _ in range(2):
        broker.wait(owner, 0.0)
        assert take(broker, owner) == []


# -- races ---------------------------------------------------------------------------------------

SETTLE = """
    PERFORM settle((SELECT number FROM owner WHERE id = 'one'), 'one', ROW({},
                   0, 0, '', '', 1, 2, NULL, false, -1)::verdict, clock(p), p);
"""
"""What the first transaction of a step does that ends a job, to be put into another function."""


@HOWS
def test_to_look_at_limits_swallows_no_hint(
    broker: PostgresBroker, url: str, schema: str, how: str
) -> None:
    """A step has committed, and has not got to the gate, when somebody looks."""
    put(broker, 2, **limit(broker, how, LimitSettings(concurrency=1)))
    [lease] = take(broker, "one")
    falls_asleep(broker)
    with connect(url, autocommit=True, options=f"-csearch_path={schema}") as conn:
        settle = SETTLE.format(lease.token)
        prefs = "p prefs := '(0,60,60,60,9,300)'::prefs"
        conn.execute(f"DO $$ DECLARE {prefs}; BEGIN {settle} END $$".encode())
    # when
    [shown] = broker.limits()
    # then
    assert shown.running == 0
    assert is_woken(broker)
    assert names(take(broker, "idle")) == ["j0001"]


@HOWS
def test_an_owner_that_opens_a_limit_after_its_last_look_is_woken(
    broker: PostgresBroker, url: str, schema: str, how: str
) -> None:
    """It is asleep by then, and who ended the job was not at the gate."""
    put(broker, 2, **limit(broker, how, LimitSettings(concurrency=1)))
    [lease] = take(broker, "one")
    falls_asleep(broker)
    with connect(url, autocommit=True, options=f"-csearch_path={schema}") as conn:
        row = conn.execute("SELECT pg_get_functiondef('look_again'::regproc)").fetchone()
        end = "    due := d - clock(p);\n"
        assert end in row[0]
        conn.execute(row[0].replace(end, end + SETTLE.format(lease.token)).encode())
        assert take(broker, "idle") == []
        conn.execute(row[0].encode())
    assert is_woken(broker)
    assert names(take(broker, "idle")) == ["j0001"]


@HOWS
def test_a_step_without_a_job_waits_for_the_limiter_that_another_holds(
    broker: PostgresBroker, url: str, schema: str, how: str
) -> None:
    ids = put(broker, 1, **limit(broker, how, LimitSettings(concurrency=2)))
    got: list[Lease] = []
    with connect(url) as holder, connect(url, autocommit=True) as looker:
        holder.execute(f"SELECT FROM {schema}.gate FOR UPDATE".encode())
        thread = threading.Thread(target=lambda: got.extend(take(broker, "one")))
        thread.start()
        until_blocked(looker, holder)
        holder.rollback()
        thread.join(60)
    assert names(got) == ids


@HOWS
def test_a_place_that_becomes_free_while_another_is_at_the_gate_is_not_forgotten(
    broker: PostgresBroker, url: str, schema: str, how: str
) -> None:
    # law 13: who comes leaves it to the one at the gate, which looks once more after its commit
    fields = limit(broker, how, LimitSettings(concurrency=2))
    ids = put(broker, 4, **fields)
    [first], [second] = take(broker, "one"), take(broker, "two")
    falls_asleep(broker)
    got: list[Lease] = []

    def step() -> None:
        got.extend(broker.exchange(Step("one", [done(first)], want=Want(1))).leases)

    with connect(url) as holder, connect(url, autocommit=True) as looker:
        # The step has passed the gate, and waits for a command to itself that somebody holds.
        broker.command("one", Command("dump"))
        holder.execute(f"SELECT FROM {schema}.command FOR UPDATE".encode())
        thread = threading.Thread(target=step)
        thread.start()
        until_blocked(looker, holder)
        broker.exchange(Step("two", [done(second)]))
        falls_asleep(broker)
        holder.rollback()
        thread.join(60)
    assert names(got) == ids[2:3]
    assert is_woken(broker)
    assert names(take(broker, "idle")) == ids[3:]


@HOWS
def test_a_put_in_a_long_transaction_holds_up_nobody(
    broker: PostgresBroker, url: str, how: str
) -> None:
    # laws 13, 17
    fields = limit(broker, how, LimitSettings(concurrency=1))
    with connect(url) as user:
        broker.put([Envelope(id="late", task="t", **fields)], txn=user)
        ids = put(broker, 2, **fields)  # also where the lane is new
        [lease] = take(broker, "one")
        assert names([lease]) == ids[:1]
        [lease] = broker.exchange(Step("one", [done(lease)], want=Want(1))).leases
        if how == "lane":
            broker.set_limit("api", LimitSettings(concurrency=2), declared=True)
        else:
            broker.set_limit("default", LimitSettings(concurrency=2), queue=True)
        falls_asleep(broker)
        user.commit()
    assert is_woken(broker)
    assert names(take(broker, "idle")) == ["late"]


def test_steps_puts_acts_and_changes_never_wait_in_a_circle_nor_let_too_many_run(
    broker: PostgresBroker, server: Postgres, url: str, schema: str
) -> None:
    # law 13
    broker.set_limit("q", LimitSettings(concurrency=7), queue=True)
    crowd = Crowd(url, schema)
    crowd.run()
    assert crowd.errors == []
    most = crowd.most
    assert most.pop(f"nthree{chr(31)}") <= 3
    assert max(most.values()) == 1
    rows = broker.limits()
    assert [row.running for row in rows] == [0] * len(rows)
    assert sum(row.ready + row.running for row in broker.stats()) == 0
    log = server.log.read_text(errors="replace")
    for word in ("deadlock detected", "put off"):
        at = log.find(word)
        assert at < 0, log[at : at + 3000]


class Crowd:
    """Producers, workers, and one who counts how many of each lane run at a time."""

    claims = (
        JobLimit("three", "", 1.0, LimitSettings(concurrency=3)),
        *(JobLimit("one", key, 1.0, LimitSettings(concurrency=1)) for key in "abc"),
    )

    def __init__(self, url: str, schema: str) -> None:
        self.url, self.schema = url, schema
        self.over = threading.Event()
        self.errors: list[BaseException] = []
        self.most: dict[str, int] = {}

    def run(self) -> None:
        """Until all is done."""
        producers = [self._start(self.produce, n) for n in range(2)]
        others = [self._start(self.work, n) for n in range(3)] + [self._start(self.count, 0)]
        for thread in producers:
            thread.join(120)
        self.over.set()
        for thread in others:
            thread.join(120)
            assert not thread.is_alive()

    def _start(self, work: Callable[[int], None], number: int) -> threading.Thread:
        def guarded() -> None:
            try:
                work(number)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def produce(self, number: int) -> None:
        """Put, partly in transactions, cancel and change limits."""
        broker = open_broker(self.url)
        with connect(self.url) as user:
            for n in range(60):
                some = [
                    Envelope(id=new_id(), task="t", queue=queue, limit=claim)
                    for claim in self.claims[:: 1 if number else -1]
                    for queue in ("q", "other")
                ]
                broker.put(some, txn=user if n % 5 == 0 else None)
                user.commit()
                if n % 7 == 0:
                    broker.cancel([some[0].id, some[3].id])
                if n % 20 == 0:
                    terms = LimitSettings(concurrency=n + number)
                    with_limits(broker, "").set_limit("spare", terms, declared=True)
        broker.close()

    def work(self, number: int) -> None:
        """Take and settle until there is nothing more."""
        broker, owner = open_broker(self.url), f"w{number}"
        broker.attach(Owner(id=owner, name=owner))
        leases: list[Lease] = []
        empty = 0
        while empty < 3:
            back = [lease.seq % 10 == 0 and not lease.token & 65535 for lease in leases]  # once
            verdicts = [
                done(lease, Outcome.RELEASE if goes else Outcome.SUCCESS)
                for lease, goes in zip(leases, back, strict=True)
            ]
            step = Step(owner, verdicts, want=Want(4, sleep=False))
            leases = list(broker.exchange(step).leases)
            empty = 0 if leases or not self.over.is_set() else empty + 1
        broker.close()

    def count(self, _: int) -> None:
        """Look how many run."""
        text = f"SELECT lane, count(*) FROM {self.schema}.lease WHERE lane <> '' GROUP BY 1"
        with connect(self.url, autocommit=True) as conn:
            while not self.over.is_set():
                for lane, number in conn.execute(text.encode()).fetchall():
                    self.most[lane] = max(self.most.get(lane, 0), number)


# -- waking --------------------------------------------------------------------------------------


@HOWS
def test_a_put_hands_over_nothing_that_may_not_start(broker: PostgresBroker, how: str) -> None:
    # law 13
    fields = limit(broker, how, LimitSettings(concurrency=1))
    put(broker, 1, **fields)
    assert len(take(broker, "one")) == 1
    falls_asleep(broker)
    put(broker, 1, "more", **fields)
    assert running(broker) == ["j0000"]
    falls_asleep(broker)
    put(broker, 1, "free", queue="elsewhere")
    assert is_woken(broker)
    assert names(take(broker, "idle")) == ["free0000"]


@HOWS
def test_an_end_wakes_a_sleeper_for_the_place_it_leaves(broker: PostgresBroker, how: str) -> None:
    fields = limit(broker, how, LimitSettings(concurrency=1))
    put(broker, 3, **fields)
    [lease] = take(broker, "one")
    falls_asleep(broker)
    broker.exchange(Step("one", [done(lease)]))
    assert is_woken(broker)
    assert names(take(broker, "idle")) == ["j0001"]


@HOWS
def test_a_sleeper_wakes_when_time_opens_a_gate(broker: PostgresBroker, how: str) -> None:
    # laws 9, 13
    fields = limit(broker, how, LimitSettings(rate=(1, 2), burst=1))
    put(broker, 3, **fields)
    begun = time.monotonic()
    assert len(take(broker, "one")) == 1
    while not (reply := broker.exchange(Step("idle", want=Want(1)))).leases:
        assert 0 <= reply.next_due <= 2
        assert time.monotonic() - begun < 30
        broker.wait("idle", reply.next_due)
    assert names(reply.leases) == ["j0001"]
    assert time.monotonic() - begun >= 1.999


# -- what is kept --------------------------------------------------------------------------------


def test_a_server_that_was_killed_knows_its_limits(
    broker: PostgresBroker, server: Postgres
) -> None:
    # laws 1, 13
    broker.set_limit("a", LimitSettings(rate=(1, 3600), burst=2), queue=True)
    put(broker, 5, queue="a")
    put(broker, 5, "lane", queue="b", limit=JobLimit("api", "k", 1.0, LimitSettings(concurrency=1)))
    first = take(broker, "one", 10)
    assert len(first) == 3
    server.kill()
    server.start()
    assert take(broker, "one", 10) == []
    assert [row.running for row in broker.limits()] == [2, 1]
    step = Step("one", [done(lease) for lease in first], want=Want(10))
    assert len(broker.exchange(step).leases) == 1


def test_a_step_whose_reply_was_lost_takes_its_tokens_once(
    broker: PostgresBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # laws 4, 13
    broker.set_limit("default", LimitSettings(rate=(1, 3600), burst=3), queue=True)
    put(broker, 5)
    execute = psycopg.Connection.execute
    lost: list[bytes] = []

    def lose(self: psycopg.Connection, query: Any, *args: Any, **options: Any) -> Any:
        cursor = execute(self, query, *args, **options)
        if isinstance(query, bytes) and b".exchange(" in query and not lost:
            lost.append(query)
            self.close()
            raise psycopg.OperationalError("the reply is lost")
        return cursor

    monkeypatch.setattr(psycopg.Connection, "execute", lose)
    assert len(take(broker, "one", 2)) == 2
    assert lost
    assert len(take(broker, "one", 5)) == 1


def test_nothing_is_left_of_lanes_that_nobody_uses(
    broker: PostgresBroker, url: str, schema: str, moved_clock: MovedClock
) -> None:
    # law 15
    terms = LimitSettings(rate=(10, 1), burst=2, window=(5, 1))
    broker.put(
        [
            Envelope(id=new_id(), task="t", limit=JobLimit("api", f"user{n}", 1.0, terms))
            for n in range(20)
        ]
    )
    leases = take(broker, "one", 50)
    assert len(leases) == 20
    broker.exchange(Step("one", [done(lease) for lease in leases]))
    moved_clock.advance(10.0)
    broker.tick()
    with connect(url) as conn:
        for table in ("gate", "parked", "stand", "inbox", "said"):
            [(left,)] = conn.execute(f"SELECT count(*) FROM {schema}.{table}".encode()).fetchall()
            assert left == 0, table
