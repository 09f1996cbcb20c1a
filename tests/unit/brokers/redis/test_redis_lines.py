"""Connections to Redis that lose replies, and sleepers that are gone: nothing is done twice."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import ConnectionError as RedisConnectionError
from servers import Redis, language

from tidemill import InvalidOption
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Step, Want
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.redis import record
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.connections import ServerConnection
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Note, Outcome, Owner, Placed, State, Verdict
from tidemill.core.signals import SignalsDeferred
from tidemill.errors import BrokerUnavailable, DuplicateJob


class Faults:
    """What becomes of the next commands: ``reply`` loses the answer, ``request`` the question."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.next: list[str] = []
        self.sent: list[tuple[Any, ...]] = []
        real = ServerConnection._send

        def send(line: ServerConnection, command: tuple[Any, ...]) -> Any:
            fault = self.next.pop(0) if self.next and command[0] == b"FCALL" else ""
            if fault == "request":
                line.close()
                raise RedisConnectionError("cut")
            answer = real(line, command)
            self.sent.append(command)
            if fault == "reply":
                line.close()
                raise RedisConnectionError("cut")
            return answer

        monkeypatch.setattr(ServerConnection, "_send", send)


@pytest.fixture
def faults(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def job(**fields: Any) -> Envelope:
    return Envelope(**{"id": new_id(), "task": "t", **fields})


@pytest.mark.parametrize("fault", ["reply", "request"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_put_whose_reply_was_lost_is_done_once(
    broker: Broker, faults: Faults, fault: str, count: int
) -> None:
    # laws 4, 11: the very same call is no DuplicateJob
    broker.put([job()])  # the queue is known, and the line open
    jobs = [job() for _ in range(count)]
    faults.next = [fault]
    assert [put.placed for put in broker.put(jobs)] == [Placed.CREATED] * count
    assert broker.stats()[0].accepted == count + 1
    with pytest.raises(DuplicateJob):  # another call is
        broker.put(jobs[:1])


def test_a_put_under_a_key_is_answered_as_the_first_time(broker: Broker, faults: Faults) -> None:
    # law 12
    broker.put([job(id="a", key="k")])
    faults.next = ["reply"]
    [put] = broker.put([job(id="b", key="k", on_conflict="replace")])
    assert (put.id, put.placed) == ("b", Placed.REPLACED)


def test_acts_whose_reply_was_lost_tell_what_they_did(broker: Broker, faults: Faults) -> None:
    broker.put([job(id="a"), job(id="b", queue="q")])
    faults.next = ["reply"]
    assert broker.cancel(["a", "none"]) == [True, False]
    faults.next = ["reply"]
    assert broker.retry(["a"]) == [True]
    faults.next = ["reply"]
    assert broker.delete(["a"]) == [True]
    faults.next = ["reply"]
    assert delete_waiting(broker, "q") == 1


def test_a_request_that_arrives_late_does_nothing(broker: Broker, faults: Faults) -> None:
    # law 4: it was repeated and answered, and its session has gone on
    broker.put([job()])
    del faults.sent[:]
    broker.put([job(id="late", queue="default")])
    [late] = [command for command in faults.sent if command[0] == b"FCALL"]
    broker.delete(["late"])
    broker.put([job()])
    broker._lines.ask(*late)  # type: ignore[attr-defined]
    assert broker.get("late") is None


@pytest.mark.parametrize("fault", ["reply", "request"])
def test_a_step_whose_reply_was_lost_is_done_once(
    broker: Broker, faults: Faults, fault: str
) -> None:
    # laws 3, 4
    broker.put([job(id=f"j{n}") for n in range(5)])
    broker.attach(Owner(id="w", name="w"))
    [one] = broker.exchange(Step("w", want=Want(1))).leases
    notes = [Note(one.token, line="x")]
    step = Step("w", [Verdict(one.token, Outcome.SUCCESS)], Want(2), notes=notes)
    faults.next = [fault, fault]  # it is tried twice before it is given up for now
    with pytest.raises(BrokerUnavailable):
        broker.exchange(step)
    reply = broker.exchange(step)
    assert reply.settled == [True]
    assert [lease.open().id for lease in reply.leases] == ["j1", "j2"]
    record = broker.get("j0")
    assert (record.state, len(record.attempts), len(record.log)) == (State.SUCCEEDED, 1, 1)
    assert broker.stats()[0].running == 2


def test_a_step_from_before_an_attach_does_nothing(broker: Broker, faults: Faults) -> None:
    # law 4: whatever it would lease, nobody would hear of
    broker.attach(Owner(id="w", name="w"))
    del faults.sent[:]
    broker.exchange(Step("w", want=Want(1)))
    [late] = [command for command in faults.sent if command[0] == b"FCALL"]
    broker.attach(Owner(id="w", name="w"))
    broker.put([job()])
    broker._lines.ask(*late)  # type: ignore[attr-defined]
    assert broker.stats()[0].ready == 1


def test_a_hint_for_a_sleeper_that_is_gone_goes_to_the_next(
    broker: Broker, open_one: Callable[[], Broker]
) -> None:
    # law 9: a killed worker stays on the list of sleepers until it is given up
    other = open_one()
    other.attach(Owner(id="gone", name="gone"))
    assert other.exchange(Step("gone", want=Want(1))).leases == []
    broker.attach(Owner(id="here", name="here"))
    assert broker.exchange(Step("here", want=Want(1))).leases == []
    broker.wait("here", 0)
    other._owners["gone"].sleeper.close()  # type: ignore[attr-defined]
    broker.tick()  # so that no housekeeping ends the wait
    producer = open_one()
    threading.Timer(0.1, lambda: producer.put([job()])).start()
    began = time.monotonic()
    broker.wait("here", 29)
    assert time.monotonic() - began < 20
    assert len(broker.exchange(Step("here", want=Want(1))).leases) == 1


def test_an_owner_that_falls_asleep_during_a_put_is_woken(
    broker: Broker, open_one: Callable[[], Broker]
) -> None:
    # law 9: no wake-up is lost between the look and the sleep
    rounds, other = 300, open_one()
    broker.attach(Owner(id="w", name="w"))
    taken = threading.Semaphore(0)
    late: list[float] = []

    def put() -> None:
        for n in range(rounds):
            other.put([job(id=f"j{n}", created=time.monotonic())])
            if not taken.acquire(timeout=60):
                return

    producer = threading.Thread(target=put)
    producer.start()
    verdicts: list[Verdict] = []
    until = time.monotonic() + 240
    while len(late) < rounds and time.monotonic() < until:
        reply = broker.exchange(Step("w", verdicts, Want(1)))
        verdicts = [Verdict(lease.token, Outcome.SUCCESS) for lease in reply.leases]
        for lease in reply.leases:
            late.append(time.monotonic() - lease.open().created)
            taken.release()
        if not reply.leases:
            broker.wait("w", min(10.0, reply.next_due))
    producer.join(60)
    assert len(late) == rounds
    assert max(late) < 9  # less than a wait that nobody ends


def test_a_server_that_sorts_text_by_a_language(tmp_path: Path) -> None:
    # laws 1, 10: Lua compares strings by the rules of the language the server was started in
    server = Redis(env=language(tmp_path))
    assert server.run("EVAL", "return ('Z' < '[') and 1 or 0", "0") == "0"
    broker = open_broker(server.url)
    for number in range(300):  # one call each: the serials take every value of a byte
        broker.put([Envelope(id=f"j{number}", task="t", queue="ab"[number % 2])])
    assert sum(queue.ready for queue in broker.stats()) == 300
    broker.attach(Owner(id="w", name="w"))
    want = Want(300, ("a", "b"), Mode.MERGED)
    leases = broker.exchange(Step("w", want=want)).leases
    assert [lease.open().id for lease in leases] == [f"j{number}" for number in range(300)]
    broker.close()
    server.close()


def test_a_server_without_its_last_moments_gives_out_no_token_again() -> None:
    # law 4: else a verdict of then would settle a job of now
    server = Redis()
    broker = open_broker(server.url)
    broker.put([Envelope(id=name, task="t") for name in "abc"])
    broker.attach(Owner(id="w", name="w"))
    server.run("SAVE")  # what the disk has, or a replica
    before = broker.exchange(Step("w", want=Want(3))).leases
    # when
    server.kill()
    server.start()
    (again,) = broker.exchange(Step("w", want=Want(1))).leases
    # then
    late = [Verdict(lease.token, Outcome.SUCCESS, result=b"of then") for lease in before]
    assert broker.exchange(Step("w", late)).settled == [False] * 3
    assert again.token > max(lease.token for lease in before)
    assert [record.state for record in map(broker.get, "abc") if record] == [
        State.RUNNING, State.READY, State.READY,
    ]  # fmt: skip
    broker.close()
    server.close()


def test_a_store_of_another_format_is_refused() -> None:
    server = Redis()
    open_broker(server.url).close()
    server.run("SET", "{tidemill}:format", "3")
    with pytest.raises(BrokerUnavailable, match="format 3"):
        open_broker(server.url)
    server.close()


def test_a_batch_larger_than_one_step_may_be_is_refused(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "PUT_MOST", 10)
    broker.put([job() for _ in range(10)])
    with pytest.raises(InvalidOption, match="at most 10 jobs in one put, not 11; put them in"):
        broker.put([job() for _ in range(11)])
    assert broker.info()["jobs"] == 10


# -- signals ---------------------------------------------------------------------------------------


@pytest.fixture
def ticks() -> Iterator[None]:
    """A signal comes four times a second. Its handler ends a test that takes far too long."""
    give_up = time.monotonic() + 20

    def handle(*_: object) -> None:
        assert time.monotonic() < give_up, "signals make the wait longer"

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.everyday
@pytest.mark.usefixtures("ticks")
def test_a_call_to_a_silent_server_ends_in_time_although_signals_come(
    durable: Redis, open_one: Callable[..., RedisBroker]
) -> None:
    broker = open_one(f"{durable.url}?patience=1")
    broker.put([Envelope(id="a", task="t")])
    for section in (contextlib.nullcontext(), SignalsDeferred()):
        with durable.stalled(), section, pytest.raises(BrokerUnavailable):
            broker.put([Envelope(id="b", task="t")])
