"""Servers that refuse, break off, die and come back: nothing is lost, and one sentence says it."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
from postgres_desk import connect, ids, job, lose_replies, take
from servers import Postgres, free_port

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Command, Owner, State, Verdict
from tidemill.errors import BrokerUnavailable, StoreFull

pytestmark = pytest.mark.full

CONNECTIONS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    server = Postgres(f"max_connections={CONNECTIONS}", "log_min_messages=fatal")
    yield server
    server.close()


@pytest.fixture
def url(server: Postgres) -> str:
    server.run("DROP SCHEMA IF EXISTS tidemill CASCADE")
    return f"{server.url()}?migrate=1&patience=120"


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)


def cut(server: Postgres) -> None:
    """End every session, as an administrator may."""
    server.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.url("nowhere"), "no such database"),
        (lambda s: s.url().replace("tidemill@", "stranger@"), "does not let this user in"),
        (
            lambda s: s.url().replace(str(s.port), str(free_port())),
            "cannot reach PostgreSQL at .*correct the url",
        ),
    ],
)
def test_a_store_that_cannot_be_opened_is_named_in_one_sentence(
    server: Postgres, change: Callable[[Postgres], str], said: str
) -> None:
    # case Q17
    with pytest.raises(BrokerUnavailable, match=said) as caught:
        open_broker(change(server) + "?patience=0")
    assert "\n" not in str(caught.value)


def test_a_wrong_password_is_said_and_never_shown(
    server: Postgres, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    # case Q17
    server.run("ALTER ROLE tidemill PASSWORD 'right'")
    hba = server.data / "pg_hba.conf"
    before = hba.read_text()
    try:
        hba.write_text("host all all 127.0.0.1/32 scram-sha-256\nlocal all all trust\n")
        subprocess.run(["kill", "-HUP", str(server.pid)], check=True)
        url = server.url().replace("tidemill@", "tidemill:{}@")
        until(lambda: _refuses(server.url()))
        caplog.set_level(logging.DEBUG)
        with pytest.raises(BrokerUnavailable, match="password is wrong") as caught:
            open_broker(url.format("hushhush") + "?patience=0")
        right = open_broker(url.format("right"))
        shown = [right.url, str(right.info()), str(caught.value), caplog.text]
        right.close()
        assert not [text for text in shown if "hushhush" in text or ":right@" in text]
    finally:
        hba.write_text(before)
        subprocess.run(["kill", "-HUP", str(server.pid)], check=True)
        until(lambda: not _refuses(server.url()))


def _refuses(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return True
    return False


def test_too_many_connections_are_said(server: Postgres, url: str) -> None:
    held: list[psycopg.Connection] = []
    try:
        until(lambda: _are_all_taken(server, held))
        for conn in held[-3:]:
            conn.close()  # those are kept for superusers, as we are here
        server.run("CREATE ROLE plain LOGIN")
        plain = server.url().replace("tidemill@", "plain@") + "?patience=0"
        with pytest.raises(BrokerUnavailable, match="no connection left"):
            open_broker(plain)
    finally:
        for conn in held:
            conn.close()
        server.run("DROP ROLE IF EXISTS plain")


def _are_all_taken(server: Postgres, held: list[psycopg.Connection]) -> bool:
    """Connect until the server refuses; sessions that are ending have connections for a while."""
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            held.append(psycopg.connect(server.url()))
    return len(held) == CONNECTIONS


def test_a_standby_is_read_only(server: Postgres, broker: Broker) -> None:
    server.run("ALTER DATABASE postgres SET default_transaction_read_only = on")
    try:
        cut(server)
        with pytest.raises(BrokerUnavailable, match="read-only"):
            broker.put([job()])
    finally:
        reset = "ALTER DATABASE postgres RESET default_transaction_read_only"
        server.run(f"BEGIN; SET TRANSACTION READ WRITE; {reset}; COMMIT")


def test_without_room_puts_are_refused(server: Postgres, broker: Broker) -> None:
    # law 16: a limit of the server's stands for its disk
    with connect(server.url(), autocommit=True) as conn:
        conn.execute(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "RAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = 'No space left on device'; END $$"
        )
        conn.execute(
            "CREATE TRIGGER full_disk BEFORE INSERT ON tidemill.job EXECUTE FUNCTION full_disk()"
        )
        try:
            with pytest.raises(StoreFull, match=r"No space left on device.*make room"):
                broker.put([job()])
        finally:
            conn.execute("DROP FUNCTION full_disk CASCADE")
    broker.put([job()])


def test_sessions_that_are_ended_lose_nothing(server: Postgres, broker: Broker) -> None:
    # laws 1, 4, 5: the owner lives, and comes back
    broker.attach(Owner(id="o", name="w"))
    broker.put([job(id=f"j{n}") for n in range(3)])
    [lease] = take(broker, "o")
    for n in range(3):
        cut(server)
        broker.put([job(id=f"more{n}")])
        cut(server)
        assert broker._owners.reap() == 0
        assert broker.get("j0").state is State.RUNNING
    cut(server)
    assert broker.exchange(Step("o", verdicts=[Verdict(lease.token, 0)])).settled == [True]
    until(lambda: _listens(server))
    cut(server)
    until(lambda: _listens(server))  # again
    assert len(take(broker, "o", 9)) == 5


def _listens(server: Postgres) -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'tidemill'"
    return server.run(query) == "1"


def test_a_sleeper_hears_again_after_its_connection_was_cut(
    server: Postgres, broker: Broker, url: str
) -> None:
    # law 9
    broker.attach(Owner(id="o", name="w"))
    taken: list[str] = []

    def work() -> None:
        end = time.monotonic() + 20
        while not taken and time.monotonic() < end:
            taken.extend(lease.open().id for lease in take(broker, "o"))
            if not taken:
                broker.wait("o", 20)

    thread = threading.Thread(target=work)
    thread.start()
    cut(server)
    until(lambda: _listens(server))
    other = open_broker(url)
    other.put([job(id="one")])
    other.close()
    thread.join(20)
    assert taken == ["one"]


def test_a_server_that_is_killed_loses_nothing(server: Postgres, broker: Broker) -> None:
    # law 1, case Q20: puts wait for it, and what was leased stays leased
    broker.attach(Owner(id="o", name="w"))
    broker.put([job(id=f"j{n}") for n in range(20)])
    leases = take(broker, "o", 5)
    accepted: list[str] = []

    def produce() -> None:
        for n in range(40):
            accepted.extend(put.id for put in broker.put([job(id=f"p{n}")]))

    thread = threading.Thread(target=produce)
    thread.start()
    for _ in range(2):
        until(lambda: bool(accepted))
        server.kill()
        with pytest.raises(BrokerUnavailable):
            broker.exchange(Step("o"))
        server.start()
    thread.join(240)
    assert len(accepted) == 40
    assert ids(broker) == {f"j{n}" for n in range(20)} | {f"p{n}" for n in range(40)}
    # then: the owner has kept its jobs, nobody was given up
    reply = _exchange(broker, Step("o", verdicts=[Verdict(lease.token, 0) for lease in leases]))
    assert reply.settled == [True] * 5
    assert broker._owners.reap() == 0
    left = _exchange(broker, Step("o", want=Want(100))).leases
    assert len({lease.open().id for lease in left}) == 55


def _exchange(broker: Broker, step: Step):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + 120
    while True:
        try:
            return broker.exchange(step)
        except BrokerUnavailable:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_exchange_says_soon_that_the_server_is_away(server: Postgres, broker: Broker) -> None:
    broker.attach(Owner(id="o", name="w"))
    server.kill()
    try:
        for _ in range(5):
            start = time.monotonic()
            with pytest.raises(BrokerUnavailable):
                broker.exchange(Step("o"))
            assert time.monotonic() - start < 15  # less than the patience of a put
    finally:
        server.start()
    assert _exchange(broker, Step("o")).settled == []


def test_a_put_whose_reply_was_lost_is_answered_and_not_done_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # laws 4, 11
    broker.put([job(id="old", key="k")])
    lost = lose_replies(monkeypatch, b".put(")
    puts = broker.put([job(id="one"), job(id="two", key="k")])
    assert lost
    assert [(put.id, str(put.placed)) for put in puts] == [("one", "created"), ("old", "kept")]
    assert ids(broker) == {"old", "one"}
    assert broker.stats()[0].accepted == 2
    broker.put([job(id="next")])


def test_a_put_of_one_job_whose_reply_was_lost_is_done_once(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 4
    for job_id in ("first on its connection", "second"):
        lost = lose_replies(monkeypatch, b".put_single(")
        [put] = broker.put([job(id=job_id)])
        assert lost
        assert (put.id, str(put.placed)) == (job_id, "created")
        monkeypatch.undo()
    assert broker.stats()[0].accepted == 2


def test_a_step_whose_reply_was_lost_is_answered_and_not_done_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 4
    broker.attach(Owner(id="o", name="w"))
    broker.put([job(id=f"j{n}") for n in range(4)])
    broker.cancel(["none"])
    lost = lose_replies(monkeypatch, b".exchange(")
    leases = take(broker, "o", 2)
    assert lost
    assert [lease.open().id for lease in leases] == ["j0", "j1"]
    lost.clear()
    verdicts = [Verdict(leases[0].token, 0), Verdict(77, 0), Verdict(leases[1].token, 1, delay=9)]
    reply = broker.exchange(Step("o", verdicts=verdicts, touch=[(77, 0.0)], want=Want(9)))
    assert lost
    assert (reply.settled, reply.touched) == ([True, False, True], [False])
    assert [lease.open().id for lease in reply.leases] == ["j2", "j3"]
    row = broker.stats()[0]
    assert (row.succeeded, row.retried, row.running, row.scheduled) == (1, 1, 2, 1)
    assert broker.get("j1").attempt == 1


@pytest.mark.parametrize("act", ["cancel", "retry", "delete"])
def test_an_act_whose_reply_was_lost_is_answered_and_not_done_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    # laws 4, 14
    broker.put([job(id="a", delay=60.0), job(id="b", delay=60.0)])
    lost = lose_replies(monkeypatch, b"." + act.encode() + b"(")
    assert getattr(broker, act)(["a", "none"]) == [True, False]
    assert lost
    assert getattr(broker, act)(["b"]) == [True]


def test_a_command_and_a_release_happen_once_though_the_reply_was_lost(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 4
    broker.attach(Owner(id="o", name="w"))
    broker.attach(Owner(id="gone", name="gone"))
    broker.put([job(id="a"), job(id="b", delay=60.0)])
    take(broker, "gone")
    assert lose_replies(monkeypatch, b".send_command(") == []
    assert broker.command("o", Command("dump"))
    assert [command.verb for command in broker.exchange(Step("o")).commands] == ["dump"]
    lost = lose_replies(monkeypatch, b".let_go(")
    assert broker.release("gone", None) == 1
    assert lost
    record = broker.get("a")
    assert record.losses == 1
    lost = lose_replies(monkeypatch, b".cancel(")
    assert delete_waiting(broker, "default") == 2
    assert lost


def test_jobs_taken_in_whose_reply_was_lost_are_said_to_be_taken(
    server: Postgres, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # laws 1, 4
    source = open_broker(f"{server.url()}?migrate=1&schema=source")
    source.put([job(id="a"), job(id="b")])
    departure = source.depart("postgresql://elsewhere/x", seal=True)
    records = source.find(Filter(), 10).records
    source.close()
    lost = lose_replies(monkeypatch, b".adopt_all(")
    assert broker.adopt(departure, records, "far") == [True, True]
    assert lost
    assert ids(broker) == {"a", "b"}
