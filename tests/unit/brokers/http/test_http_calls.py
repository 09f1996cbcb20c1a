"""``http://``: lost replies, servers that go and come back, sleepers, and refused clients."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_desk import HttpOwner, Lossy, job
from servers import Proxy, forget_served, served

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.rpc import Refusal
from tidemill.brokers.http import connections, errors, owners
from tidemill.brokers.http.address import check_url
from tidemill.brokers.registry import open_broker
from tidemill.core.config import parse_url
from tidemill.core.job import Outcome, State, Verdict
from tidemill.errors import BrokerUnavailable, DuplicateJob, InvalidOption, JobNotFound, QueueFull

pytestmark = pytest.mark.everyday


@pytest.fixture(autouse=True)
def patient_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls have 30 s for their answers: a busy machine may answer late."""
    monkeypatch.setattr(connections, "STEP_TIMEOUT", 30.0)
    monkeypatch.setattr(owners, "STEP_TIMEOUT", 30.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The url of a store behind a job server."""
    yield served(f"lmdb://{tmp_path}/store")
    forget_served(tmp_path)


def through(url: str, port: int, options: str = "") -> str:
    """The url by another port."""
    host, path = url.removeprefix("http://").split("/", 1)
    assert host.startswith("127.0.0.1:")
    return f"http://127.0.0.1:{port}/{path}{options}"


@pytest.fixture
def lossy(store: str) -> Iterator[Lossy]:
    connection = Lossy(int(store.split(":")[2].split("/")[0]))
    yield connection
    connection.close()


@pytest.fixture
def broker(store: str, lossy: Lossy) -> Iterator[Broker]:
    broker = open_broker(through(store, lossy.port, "?patience=20"))
    yield broker
    broker.close()


# -- servers of another version ------------------------------------------------------------------


def test_a_worker_leaves_a_server_that_speaks_another_version_now(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case M13
    broker = open_broker(store)
    worker, consumer = HttpOwner(broker), HttpOwner(broker, kind="consumer")
    broker.put([job()])
    [lease] = worker.exchange(want=Want(1)).leases
    monkeypatch.setattr(connections, "VERSION", "0")
    monkeypatch.setattr(errors, "VERSION", "0")
    # when its steps come to the server: each tells the worker to leave, and why
    for _ in range(2):
        reply = worker.exchange(verdicts=[Verdict(lease.token, Outcome.SUCCESS)])
        assert reply.settled == [False]
        quiet, outgrown = reply.commands
        assert quiet.verb == "quiet"
        assert re.match("outgrown the job server at .* speaks version 1", outgrown.verb)
    # then the worker sleeps until one of its processes has news
    reader, writer = os.pipe()
    os.write(writer, b"x")
    assert worker.wait(3600.0, (reader,)) == [reader]
    os.close(reader)
    os.close(writer)
    # and a consumer gets an error
    with pytest.raises(BrokerUnavailable, match="speaks version 1"):
        consumer.exchange(want=Want(1))
    monkeypatch.undo()
    broker.close()


# -- replies that are lost ----------------------------------------------------------------------


def test_a_put_whose_reply_was_lost_is_done_once(broker: Broker, lossy: Lossy) -> None:
    # law 3
    lossy.lose = "put"
    (put,) = broker.put([job()])
    assert lossy.lost == 1
    assert put.placed == "created"
    (row,) = broker.stats()
    assert (row.ready, row.accepted) == (1, 1)


def test_a_repeated_call_whose_reply_was_lost_gets_the_first_answer(
    broker: Broker, lossy: Lossy
) -> None:
    one, two = job(), job()
    broker.put([one, two])
    lossy.lose = "cancel"
    assert broker.cancel([one.id, "unknown"]) == [True, False]
    lossy.lose = "delete"
    assert broker.delete([two.id]) == [True]
    assert lossy.lost == 2


def test_a_refusal_whose_reply_was_lost_is_repeated(broker: Broker, lossy: Lossy) -> None:
    taken = job()
    broker.put([taken])
    lossy.lose = "put"
    with pytest.raises(DuplicateJob) as caught:
        broker.put([taken])
    assert caught.value.job_id == taken.id


def test_a_step_whose_reply_was_lost_is_done_once(broker: Broker, lossy: Lossy) -> None:
    # law 3: its leases come with the repetition, its verdicts are settled once
    hand = HttpOwner(broker)
    hand.exchange()
    broker.put([job() for _ in range(3)])
    lossy.lose = "exchange"
    leases = hand.exchange(want=Want(2)).leases
    assert lossy.lost == 1
    assert len(leases) == 2
    lossy.lose = "exchange"
    counts = HistoryRow("task", "t", 60, 120, (2, 0, 1))
    verdicts = [Verdict(lease.token, Outcome.SUCCESS) for lease in leases]
    reply = hand.exchange(verdicts=verdicts, history=[counts])
    assert reply.settled == [True, True]
    (row,) = broker.stats()
    assert (row.succeeded, row.ready, row.running) == (2, 1, 0)
    assert with_history(broker, "history").history("task", 60) == [counts]


def test_an_attach_whose_reply_was_lost_succeeds(broker: Broker, lossy: Lossy) -> None:
    lossy.lose = "attach"
    hand = HttpOwner(broker)
    broker.put([job()])
    assert len(hand.exchange(want=Want(1)).leases) == 1
    (owner,) = [owner for owner in broker.owners() if owner.id == hand.owner.id]
    assert owner.board == ""  # it lies on this machine, and the server has no business with it


# -- lines that are cut, servers that are gone --------------------------------------------------


@pytest.fixture
def connection(store: str) -> Iterator[Proxy]:
    proxy = Proxy(int(store.split(":")[2].split("/")[0]))
    yield proxy
    proxy.close()


def test_a_silently_cut_connection_is_noticed_and_replaced(store: str, connection: Proxy) -> None:
    broker = open_broker(through(store, connection.port, "?patience=20"))
    hand = HttpOwner(broker)
    mine = job()
    broker.put([mine, job()])
    (lease,) = hand.exchange(want=Want(1)).leases
    hand.wait(0)  # its question is asked
    connection.cut()
    done = Verdict(lease.token, Outcome.SUCCESS, result=b"r")
    line = broker._owners[hand.owner.id]._connection  # type: ignore[attr-defined]
    line._timeout = 0.3
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match="cannot reach the job server at 127"):
            hand.exchange(verdicts=[done], want=Want(1))
    line._timeout = 30.0
    connection.mend()
    # then: what was held up arrives late, and is done once all the same
    reply = hand.exchange(verdicts=[done], want=Want(1))
    assert reply.settled == [True]
    assert len(reply.leases) == 1
    record = broker.get(mine.id)
    assert (record.state, record.attempt, record.raw_result) == (State.SUCCEEDED, 1, b"r")
    (row,) = broker.stats()
    assert (row.running, row.succeeded) == (1, 1)
    broker.close()


def test_patience_waits_for_a_server_that_is_away(store: str, connection: Proxy) -> None:
    broker = open_broker(through(store, connection.port, "?patience=30"))
    port = connection.port
    connection.close()
    putting = threading.Thread(target=broker.put, args=([job()],))
    putting.start()
    time.sleep(0.2)
    assert putting.is_alive()
    again = Proxy(int(store.split(":")[2].split("/")[0]), port)
    putting.join(30)
    (row,) = broker.stats()
    assert row.ready == 1
    broker.close()
    again.close()


@pytest.mark.full
def test_patience_bounds_the_wait_for_a_hanging_server(
    store: str, connection: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # not once for each attempt
    monkeypatch.setattr(connections, "STEP_TIMEOUT", 3.0)
    broker = open_broker(through(store, connection.port, "?patience=8"))
    broker.put([job()])
    connection.cut()
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="cannot reach the job server"):
        broker.put([job()])
    assert 7.9 < time.monotonic() - began < 15.5
    connection.mend()
    broker.close()


def test_without_patience_a_call_fails_at_once(store: str, connection: Proxy) -> None:
    broker = open_broker(through(store, connection.port, "?patience=0"))
    connection.close()
    with pytest.raises(BrokerUnavailable, match="cannot reach the job server"):
        broker.put([job()])
    with pytest.raises(BrokerUnavailable):
        open_broker(through(store, connection.port, "?patience=0"))


# -- sleeping -----------------------------------------------------------------------------------


def test_a_hint_between_two_sleeps_is_not_lost(broker: Broker) -> None:
    hand = HttpOwner(broker)
    for _ in range(20):
        hand.exchange(want=Want(1))
        hand.wait(0)  # asks, and goes on
        broker.put([job()])
        until = time.monotonic() + 30
        while not (leases := hand.exchange(want=Want(1)).leases):
            hand.wait(30)
            assert time.monotonic() < until
        hand.exchange(verdicts=[Verdict(leases[0].token, Outcome.SUCCESS)])


# -- who is silent ------------------------------------------------------------------------------


@pytest.mark.full
def test_an_owner_that_is_silent_for_its_lease_is_given_up_and_told(store: str) -> None:
    # law 5
    broker, patient = open_broker(f"{store}?owner_lease=4"), open_broker(store)
    silent, other = HttpOwner(broker), HttpOwner(patient)
    broker.put([job()])
    (lease,) = silent.exchange(want=Want(1)).leases
    until = time.monotonic() + 30
    while not (leases := other.exchange(want=Want(1)).leases):
        other.wait(1)
        assert time.monotonic() < until
    assert leases[0].losses == 1
    reply = silent.exchange(verdicts=[Verdict(lease.token, Outcome.SUCCESS)])
    assert reply.settled == [False]
    assert [command.verb for command in reply.commands] == ["lost"]
    broker.attach(silent.owner)
    assert silent.exchange(want=Want(1)).commands == []
    broker.close()
    patient.close()


# -- errors, bounds, versions -------------------------------------------------------------------


def test_errors_cross_with_their_fields(broker: Broker) -> None:
    error = Refusal.of(DuplicateJob("taken", "17")).error()
    assert type(error) is DuplicateJob
    assert (str(error), error.job_id) == ("taken", "17")
    assert type(Refusal("Unheard", "of").error()).__name__ == "TidemillError"
    broker.set_queue("small", max_size=1)
    broker.put([job(queue="small")])
    with pytest.raises(QueueFull, match="max_size=1"):
        broker.put([job(queue="small")])
    with pytest.raises(JobNotFound):
        broker.put([], let_go=["nobody"])


def test_a_put_that_is_too_large_is_refused_before_it_is_sent(broker: Broker) -> None:
    jobs = [job(body=b"x" * 1_000_000) for _ in range(20)]
    with pytest.raises(InvalidOption, match="bytes"):
        broker.put(jobs)
    broker.put(jobs[:10])
    assert len(broker.find(Filter(), 100).records) == 10


def test_names_and_numbers_that_a_store_cannot_keep_are_refused(broker: Broker) -> None:
    for bad in (
        job(queue=""),
        job(queue="ä" * 101),
        job(key="x" * 201),
        job(body=b"x" * 2**20 * 2),
        *(job(delay=value) for value in (1e300, 3.2e9, float("nan"), -1.0)),
        *(job(at=value) for value in (1e300, float("inf"), -1.0)),
        *(job(expires=value) for value in (1e300, float("nan"))),
        job(timeout=1e300),
        job(created=float("nan")),
        job(rank=-1),
        job(rank=2**32),
    ):
        with pytest.raises(InvalidOption):
            broker.put([bad])


def test_another_version_of_the_protocol_is_refused(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "VERSION", "7")
    with pytest.raises(BrokerUnavailable, match=r"version 1 of the broker protocol.*version '7'"):
        open_broker(f"{store}?patience=0")
    monkeypatch.setattr(errors, "VERSION", "7")
    with pytest.raises(BrokerUnavailable, match=r"version 1 of the protocol.*speaks version 7"):
        open_broker(f"{store}?patience=0")


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("http://", "names no server"),
        ("http://host:0", "names no server"),
        ("http://host:99999", "cannot be read"),
        ("http://host?prefix=x", "prefix"),
        ("http://host?ca=x", "https"),
        ("https://host?key=x", "cert"),
        ("http://:t@host?token_file=x", "token_file"),
        ("http://host?owner_lease=0", "owner_lease"),
        ("http://host?patience=x", "patience"),
    ],
)
def test_an_invalid_url_is_refused(url: str, what: str) -> None:
    with pytest.raises(InvalidOption, match=what):
        check_url(parse_url(url))


def test_a_token_is_shown_nowhere() -> None:
    # law 16, case Q17
    address = check_url(parse_url("https://:s3cret@host/jobs/"))
    assert address.shown == "https://***@host/jobs/"
    assert (address.token(), address.port, address.prefix) == ("s3cret", 443, "/jobs")
    with pytest.raises(InvalidOption) as caught:
        check_url(parse_url("http://:s3cret@host:99999"))
    assert "s3cret" not in str(caught.value)


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    address = check_url(parse_url(f"http://host?token_file={file}"))
    with pytest.raises(BrokerUnavailable, match="token_file"):
        address.token()
    file.write_text("one\n")
    assert address.token() == "one"
    file.write_text("two\n")  # it may be changed while a worker runs
    assert address.token() == "two"
    monkeypatch.setenv("TIDEMILL_TOKEN", "three")
    assert check_url(parse_url("http://host")).token() == "three"
    monkeypatch.setenv("TIDEMILL_TOKEN", "four\n")  # as from a secret that is a file
    assert check_url(parse_url("http://host")).token() == "four"
    file.write_text("no token at all\n")
    with pytest.raises(BrokerUnavailable, match="characters"):
        address.token()
