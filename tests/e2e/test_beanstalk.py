"""The beanstalk port: waits and times as beanstalkd has them, and a Python client."""

from __future__ import annotations

import contextlib
import json
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from harness import eventually
from port_here import PortHere, port_of
from servers import NETWORK, free_port
from servers.beanstalk import Beanstalkd, Tongue
from servers.http import JobServer

from tidemill import Tidemill, chain
from tidemill.brokers.contract.early_leases import LeaseCallback
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.core.clock import new_id
from tidemill.core.job import Lease, Verdict
from tidemill.errors import BrokerUnavailable, InvalidOption
from tidemill.server.beanstalk.listener import AHEAD, BeanstalkListener
from tidemill.server.settings import Settings
from tidemill.testing import run_all


@pytest.fixture
def mill(tmp_path: Path) -> Iterator[Tidemill]:
    with Tidemill(f"lmdb://{tmp_path}/jobs?durability=relaxed") as mill:
        yield mill


@pytest.fixture
def port(mill: Tidemill) -> Iterator[PortHere]:
    with port_of(mill) as port:
        yield port


@pytest.fixture
def client(port: PortHere) -> Iterator[Tongue]:
    client = Tongue(port.number)
    yield client
    client.close()


@pytest.fixture(params=["beanstalkd", "ours"])
def come(request: pytest.FixtureRequest) -> Iterator[Callable[[], Tongue]]:
    """Connect to a server that has nothing yet: theirs, and ours."""
    server = Beanstalkd() if request.param == "beanstalkd" else None
    number = server.port if server else request.getfixturevalue("port").number
    clients: list[Tongue] = []

    def connect() -> Tongue:
        clients.append(Tongue(number))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    if server:
        server.close()


# -- what clocks decide, of both -----------------------------------------------------------------


def test_the_end_of_a_ttr_is_announced_before_it_comes(
    come: Callable[[], Tongue], request: pytest.FixtureRequest
) -> None:
    client, other = come(), come()
    number = client.put(b"x", ttr=5)
    begun = time.monotonic()
    client.send(b"reserve\r\nreserve-with-timeout 20\r\n")
    assert client.read() == b"RESERVED %d 1\r\nx" % number
    assert client.read() == b"DEADLINE_SOON"
    assert time.monotonic() - begun >= 3.99
    other.send(b"reserve\r\n")
    if request.node.callspec.params["come"] == "beanstalkd":
        # After DEADLINE_SOON it often forgets the end of the ttr, until the client says something.
        time.sleep(max(0.0, begun + 5.2 - time.monotonic()))
        client.ask(b"list-tube-used\r\n")
    assert other.read() == b"RESERVED %d 1\r\nx" % number
    assert client.ask(b"delete %d\r\n" % number) == b"NOT_FOUND"
    assert client.ask(b"reserve-with-timeout 0\r\n") == b"TIMED_OUT"
    assert other.ask(b"delete %d\r\n" % number) == b"DELETED"


def test_a_reserve_near_the_end_of_a_ttr_gets_deadline_soon_at_once(client: Tongue) -> None:
    number = client.put(b"x", ttr=2)
    client.send(b"reserve\r\n" + b"reserve-with-timeout 20\r\n" * 2)  # in one piece
    assert client.read() == b"RESERVED %d 1\r\nx" % number
    assert (client.read(), client.read()) == (b"DEADLINE_SOON", b"DEADLINE_SOON")


def test_a_touch_restarts_the_ttr(come: Callable[[], Tongue]) -> None:
    client = come()
    number = client.put(b"x", ttr=3)
    again = b"touch %d\r\nreserve-with-timeout 0\r\n" % number
    client.send(b"reserve\r\nreserve-with-timeout 20\r\n" + again)  # in one piece
    assert client.read() == b"RESERVED %d 1\r\nx" % number
    assert client.read() == b"DEADLINE_SOON"
    assert client.read() == b"TOUCHED"
    assert client.read() == b"TIMED_OUT"


def test_the_end_of_a_delay_wakes_a_waiting_client(come: Callable[[], Tongue]) -> None:
    client, other = come(), come()
    puts = b"put 0 2 9 5\r\nlater\r\nput 0 1 9 4\r\nsoon\r\n"
    client.send(puts + b"peek-delayed\r\npeek-ready\r\n")  # in one piece: before either is due
    later, number = (int(client.read().removeprefix(b"INSERTED ")) for _ in range(2))
    assert client.read() == b"FOUND %d 4\r\nsoon" % number
    assert client.read() == b"NOT_FOUND"
    assert other.ask(b"reserve\r\n") == b"RESERVED %d 4\r\nsoon" % number
    time.sleep(2.1)  # nobody waits
    assert client.ask(b"peek-ready\r\n") == b"FOUND %d 5\r\nlater" % later


def test_a_waiting_client_survives_two_pauses_at_once(port: PortHere, client: Tongue) -> None:
    waiting = Tongue(port.number)
    waiting.send(b"reserve\r\n")
    while b"\ncurrent-waiting: 1\n" not in client.ask(b"stats-tube default\r\n"):
        pass
    port.at_once(lambda state: [state.pause("default", 0) for _ in range(2)])
    number = client.put(b"x")
    assert waiting.read() == b"RESERVED %d 1\r\nx" % number
    waiting.close()


def test_a_pause_ends_by_itself(come: Callable[[], Tongue]) -> None:
    client, other = come(), come()
    other.send(b"reserve\r\n")
    time.sleep(0.3)  # it waits
    begun = time.monotonic()
    client.send(b"pause-tube default 1\r\nput 0 0 9 1\r\nx\r\n")
    assert client.read() == b"PAUSED"
    number = int(client.read().removeprefix(b"INSERTED "))
    assert other.read() == b"RESERVED %d 1\r\nx" % number
    assert time.monotonic() - begun >= 0.99


def test_the_job_of_a_client_that_left_is_free_at_once(come: Callable[[], Tongue]) -> None:
    client, other = come(), come()
    number = client.put(b"x", ttr=1000)
    client.ask(b"reserve\r\n")
    other.send(b"reserve\r\n")
    client.close()
    assert other.read() == b"RESERVED %d 1\r\nx" % number


def test_a_client_that_closes_its_side_waits_no_more(come: Callable[[], Tongue]) -> None:
    client = come()
    client.send(b"reserve\r\n")
    client.socket.shutdown(socket.SHUT_WR)
    assert client.read() == b"TIMED_OUT"
    assert client.read() == b""


def test_commands_sent_before_the_end_of_a_connection_are_done(come: Callable[[], Tongue]) -> None:
    client, other = come(), come()
    client.send(b"put 0 0 9 1\r\nx\r\nuse a\r\nput 0 0 9 1\r\ny\r\nstats-tube a\r\n")
    client.socket.shutdown(socket.SHUT_WR)
    replies = [client.read() for _ in range(4)]
    assert [reply.split()[0] for reply in replies] == [b"INSERTED", b"USING", b"INSERTED", b"OK"]
    assert other.ask(b"reserve\r\n").endswith(b"x")


def test_a_closing_port_answers_the_current_command_and_hangs_up(
    mill: Tidemill, port: PortHere, client: Tongue, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, look = threading.Event(), threading.Event(), mill.broker.stats

    def stats() -> list[QueueStats]:
        begun.set()
        assert go_on.wait(30)
        return look()

    monkeypatch.setattr(mill.broker, "stats", stats)
    client.send(b"list-tubes\r\nlist-tubes\r\n")
    assert begun.wait(30)
    port.end()
    go_on.set()
    assert client.read().startswith(b"OK ")
    assert client.read() == b""


def test_tubes_are_listed_in_the_order_in_which_they_came(client: Tongue) -> None:
    names = [b"zebra", b"ant", b"m"]
    for name in names:
        client.ask(b"use " + name + b"\r\n")
        client.put(b"x")
    listed = b"".join(b"- " + name + b"\n" for name in names)
    assert client.ask(b"list-tubes\r\n").endswith(b"---\n- default\n" + listed)


def test_an_unused_empty_tube_disappears(come: Callable[[], Tongue]) -> None:
    client = come()
    client.ask(b"use a\r\n")
    number = client.put(b"x")
    client.ask(b"use default\r\n")
    assert client.ask(b"list-tubes\r\n").endswith(b"---\n- default\n- a\n")
    assert client.ask(b"stats-tube a\r\n").startswith(b"OK ")
    client.ask(b"delete %d\r\n" % number)
    assert client.ask(b"list-tubes\r\n").endswith(b"---\n- default\n")
    assert client.ask(b"stats-tube a\r\n") == b"NOT_FOUND"
    assert client.ask(b"pause-tube a 5\r\n") == b"NOT_FOUND"


@pytest.mark.parametrize(
    ("put", "said", "producers"),
    [
        (b"put 0 0 9 1\r\nx\r\n", b"INSERTED 1", b"1"),
        (b"put 0 0 9 1\r\nxyz", b"EXPECTED_CRLF", b"1"),
        (b"put 0 0 9 70000\r\n" + bytes(70_000) + b"\r\n", b"JOB_TOO_BIG", b"0"),
        (b"put 1 2 3\r\n", b"BAD_FORMAT", b"0"),
    ],
)
def test_a_client_that_starts_a_put_is_a_producer(
    come: Callable[[], Tongue], put: bytes, said: bytes, producers: bytes
) -> None:
    client = come()
    assert client.ask(put) == said
    assert b"\ncurrent-producers: %b\n" % producers in client.ask(b"stats\r\n")


def test_stats_quote_texts_about_the_machine_for_yaml(client: Tongue) -> None:
    lines = client.ask(b"stats\r\n").decode().splitlines()
    assert f'hostname: "{platform.node()}"' in lines
    assert f'os: "{platform.version()}"' in lines
    assert f'platform: "{platform.machine()}"' in lines


# -- draining, and clients that do no good -------------------------------------------------------


def test_a_draining_port_takes_no_jobs_and_delivers_its_jobs(
    port: PortHere, client: Tongue
) -> None:
    client.put(b"x")
    port.drain()
    assert client.ask(b"put 0 0 1 1\r\ny\r\n") == b"DRAINING"
    assert b"\ndraining: true\n" in client.ask(b"stats\r\n")
    assert client.ask(b"reserve\r\n").endswith(b"x")


def test_a_client_can_repeat_a_verdict_after_the_store_was_away(
    mill: Tidemill, client: Tongue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a client with two jobs, and a store that cannot be reached
    client.put(b"x")
    client.put(b"y")
    numbers = [client.ask(b"reserve\r\n").split()[1] for _ in range(2)]
    for number in numbers:  # what hands them out is over, and hears nothing more
        assert client.ask(b"touch %s\r\n" % number) == b"TOUCHED"

    def away(step: Step) -> Reply:
        raise BrokerUnavailable("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(mill.broker, "exchange", away)
        assert client.ask(b"delete %s\r\n" % numbers[0]) == b"INTERNAL_ERROR"
        assert client.ask(b"release %s 0 0\r\n" % numbers[1]) == b"INTERNAL_ERROR"
    # then, once it can be again, both are still the client's
    assert client.ask(b"delete %s\r\n" % numbers[0]) == b"DELETED"
    assert client.ask(b"release %s 0 0\r\n" % numbers[1]) == b"RELEASED"
    assert client.ask(b"reserve\r\n").endswith(b"y")


@pytest.mark.parametrize("command", ["peek-ready", "list-tubes-watched"])
def test_a_client_that_does_not_read_is_not_read_from(
    port: PortHere, client: Tongue, command: str
) -> None:
    slow = Tongue(port.number)
    slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.socket.settimeout(1)
    client.put(b"z" * 60_000)
    sent, most = 0, 64 << 20  # far beyond what lies in the buffers of the system
    until = time.monotonic() + 60
    while sent < most:
        try:
            sent += slow.socket.send(f"{command}\r\n".encode() * 10_000)
        except TimeoutError:  # it reads no more, or has not come so far
            if sent > 20 * AHEAD:
                break
            assert time.monotonic() < until
    assert sent < most
    assert client.ask(b"list-tube-used\r\n") == b"USING default"
    assert client.put(b"x")
    slow.close()


def test_many_small_commands_of_one_client_leave_others_their_turn(
    port: PortHere, client: Tongue
) -> None:
    busy = Tongue(port.number, 300)
    many = 200_000
    sender = threading.Thread(target=busy.send, args=(b"use a\r\n" * many,), daemon=True)
    sender.start()
    assert client.ask(b"list-tube-used\r\n") == b"USING default"
    for _ in range(many):
        assert busy.read() == b"USING a"
    sender.join()
    busy.close()


def test_connections_have_a_bound(mill: Tidemill) -> None:
    with port_of(mill, max_connections=2) as port:
        first, second = Tongue(port.number), Tongue(port.number)
        assert first.ask(b"use a\r\n") == second.ask(b"use a\r\n") == b"USING a"
        third = Tongue(port.number)
        with contextlib.suppress(ConnectionError):
            assert third.read() == b""
        third.close()
        assert first.ask(b"use b\r\n") == b"USING b"
        first.close()
        second.close()


# -- Python at the other end ---------------------------------------------------------------------


def test_python_gets_the_bytes_a_client_puts(mill: Tidemill, client: Tongue) -> None:
    client.ask(b"use mail\r\n")
    number = client.put(b"\0\xff", pri=0, ttr=7)
    message = mill.queue("mail").get(timeout=30)
    assert (message.body, message.ttr, message.id) == (b"\0\xff", 7, f"#{number:012d}")
    # and what it gives back is the client's again
    client.ask(b"watch mail\r\n")
    message.release()
    assert client.ask(b"reserve\r\n") == b"RESERVED %d 2\r\n\0\xff" % number


def test_a_client_gets_what_python_puts(mill: Tidemill, client: Tongue) -> None:
    queue = mill.queue("default")
    for body in (b"raw", "grün", {"n": [1, None, 2.5]}, {1: (2, 3)}):
        queue.put(body, id=f"mine-{body!r}")
    found = [client.ask(b"reserve\r\n") for _ in range(4)]
    bodies = [reply.split(b"\r\n", 1)[1] for reply in found]
    assert bodies == [b"raw", "grün".encode(), b'{"n":[1,null,2.5]}', b'{"1":[2,3]}']
    numbers = [int(reply.split()[1]) for reply in found]
    assert len(set(numbers)) == 4
    # a job keeps its number, and is settled by it
    assert client.ask(b"release %d 0 0\r\n" % numbers[2]) == b"RELEASED"
    assert client.ask(b"peek %d\r\n" % numbers[2]).startswith(b"FOUND %d " % numbers[2])
    assert client.ask(b"delete %d\r\n" % numbers[0]) == b"DELETED"
    assert mill.broker.get(f"mine-{b'raw'!r}") is None


@pytest.mark.parametrize(("by", "states"), [("python", "ready delayed"), ("client", "ready ready")])
def test_the_policy_of_a_job_comes_from_its_put(
    mill: Tidemill, client: Tongue, by: str, states: str
) -> None:
    if by == "python":
        mill.queue("default").put("order", ttr=1)
    else:
        client.put(b"order", ttr=1)
    # when the ttr runs out twice in a client's hands
    for state in states.split():
        reply = client.ask(b"reserve-with-timeout 20\r\n")
        assert reply.startswith(b"RESERVED"), reply
        number = int(reply.split()[1])
        facts = eventually(lambda n=number: unreserved(client, n), "the ttr ends")
        # then the message of Python is delayed, and the job of a client is there at once
        assert f"state: {state}".encode() in facts


def unreserved(client: Tongue, number: int) -> bytes:
    """The facts of a job that nobody has reserved; empty while somebody has."""
    facts = client.ask(b"stats-job %d\r\n" % number)
    return b"" if b"state: reserved" in facts else facts


def test_priorities_of_both_are_one_order(mill: Tidemill, client: Tongue) -> None:
    mill.queue("default").put("0", priority=0)  # 1024
    client.put(b"1023", pri=1023)
    client.put(b"1025", pri=1025)
    mill.queue("default").put("10", priority=10)
    client.put(b"last", pri=2**32 - 1)
    client.put(b"first", pri=0)
    found = [client.ask(b"reserve\r\n").split(b"\r\n", 1)[1] for _ in range(6)]
    assert found == [b"first", b"10", b"1023", b"0", b"1025", b"last"]


def test_a_job_put_with_an_id_or_a_key_is_there_once(mill: Tidemill, client: Tongue) -> None:
    put = b"put 0 0 9 1 id=order-17\r\nx\r\n"
    first = client.ask(put)
    assert client.ask(put) == first
    assert mill.broker.get("order-17") is not None
    keyed = client.ask(b"put 0 0 9 1 key=k\r\nx\r\n")
    assert client.ask(b"put 0 0 9 1 key=k id=other\r\ny\r\n") == keyed
    assert mill.broker.get("other") is None


def test_a_number_whose_id_exists_is_skipped(mill: Tidemill, client: Tongue) -> None:
    next_number = client.put(b"x") + 1
    for n in range(next_number, next_number + 5):
        mill.queue("other").put("theirs", id=f"#{n:012d}")
    number = client.put(b"y")
    assert number >= next_number + 5
    assert client.ask(b"peek %d\r\n" % number) == b"FOUND %d 1\r\ny" % number


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    numbers = []
    for _ in range(2):
        with Tidemill(f"lmdb://{tmp_path}/jobs") as mill, port_of(mill) as port:
            client = Tongue(port.number)
            numbers += [client.put(b"x") for _ in range(3)]
            assert client.ask(b"peek %d\r\n" % numbers[0]) == b"FOUND %d 1\r\nx" % numbers[0]
            client.close()
    assert len(set(numbers)) == 6
    assert numbers == sorted(numbers)


def test_a_task_is_put_and_seen_as_json(mill: Tidemill) -> None:
    @mill.task(name="app.add")
    def add(a: int, b: int = 0) -> int:
        return a + b

    with port_of(mill, beanstalk_tasks=True) as port:
        client = Tongue(port.number)
        call = b'{"task": "app.add", "args": [1], "kwargs": {"b": 2}}'
        number = client.put(call, pri=5)
        record = mill.broker.get(f"#{number:012d}")
        assert (record.envelope.task, record.rank) == ("app.add", 5)
        body_of = client.ask(b"reserve\r\n").split(b"\r\n", 1)[1]
        assert json.loads(body_of) == {
            "task": "app.add",
            "args": [1],
            "kwargs": {"b": 2},
            "id": f"#{number:012d}",
        }
        # what is no call is a message; what no task takes is refused
        assert client.ask(b"put 0 0 1 2\r\n{}\r\n").startswith(b"INSERTED ")
        wrong = b'{"task": "app.add", "args": []}'
        reply = client.ask(b"put 0 0 1 %d\r\n%b\r\n" % (len(wrong), wrong))
        assert reply == b"BAD_FORMAT"
        client.close()


def test_a_call_that_is_nested_too_deeply_is_refused(mill: Tidemill) -> None:
    with port_of(mill, beanstalk_tasks=True, beanstalk_max_job=1 << 19) as port:
        client = Tongue(port.number)
        for depth in (*range(800, 1000, 10), 100_000):
            body = b'{"task": "app.f", "args": [%b%b]}' % (b"[" * depth, b"]" * depth)
            reply = client.ask(b"put 0 0 1 %d\r\n%b\r\n" % (len(body), body))
            assert reply == b"BAD_FORMAT" or (depth < 1000 and reply.startswith(b"INSERTED "))
        assert client.put(b"x")
        client.close()


def test_a_worker_runs_what_a_client_put(place: object) -> None:
    from harness import Place

    assert isinstance(place, Place)
    place.write("""
        @mill.task(name="app.shout")
        def shout(text):
            note("heard", text)
    """)
    with (
        Tidemill(place.mill.url, allow_imports=["*"]) as mill,
        port_of(mill, beanstalk_tasks=True) as port,
    ):
        client = Tongue(port.number)
        client.put(b'{"task": "app.shout", "args": ["hello"]}')
        place.worker().wait_ready()
        assert place.wait_notes("heard") == ["heard hello"]
        client.close()


def test_where_keys_are_set_the_port_needs_trust_and_signs(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/jobs"
    with Tidemill(url, secret_keys=["k" * 32]) as mill:
        with pytest.raises(InvalidOption, match="--beanstalk-trust"):
            BeanstalkListener(mill, Settings(beanstalk="0"))
        with port_of(mill, beanstalk_trust=True) as port:
            client = Tongue(port.number)
            client.put(b"x")
            message = mill.queue("default").get(timeout=10)
            assert message.body == b"x"
            # what nobody signed is not handed on
            with Tidemill(url) as other:
                other.queue("default").put("forged", id="forged")
            assert client.ask(b"reserve-with-timeout 0\r\n") == b"TIMED_OUT"
            record = mill.broker.get("forged")
            assert "bad signature" in record.error
            client.close()


def test_the_port_signs_the_end_of_a_step_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # case M12
    with Tidemill("memory://", secret_keys=["k"]) as mill:
        got: list[object] = []

        @mill.task(name="app.step", queue="steps")
        def step() -> None: ...

        @mill.task(name="app.keep")
        def keep(value: object) -> None:
            got.append(value)

        mill.enqueue(chain(step, keep))
        with port_of(mill, beanstalk_trust=True, beanstalk_tasks=True) as port:
            client = Tongue(port.number)
            client.ask(b"watch steps\r\n")
            number = client.ask(b"reserve-with-timeout 10\r\n").split()[1]
            with monkeypatch.context() as patch:
                patch.setattr(mill.broker, "get", pytest.fail)  # the record of the job is not read
                assert client.ask(b"delete %s\r\n" % number) == b"DELETED"
            client.close()
        run_all(mill)
        assert got == [None]


def test_other_machines_need_trust(mill: Tidemill) -> None:  # case S15
    with pytest.raises(InvalidOption, match="has no auth"):
        BeanstalkListener(mill, Settings(beanstalk="0.0.0.0:0"))


# -- the server ----------------------------------------------------------------------------------


def test_no_confirmed_job_is_lost_when_the_server_is_killed() -> None:
    # law 1
    number = free_port()
    server = JobServer("--beanstalk", f"127.0.0.1:{number}")
    confirmed: list[list[int]] = [[] for _ in range(4)]

    def put_on(mine: list[int]) -> None:
        client = Tongue(number)
        try:
            while True:
                mine.append(client.put(b"x"))
        except (OSError, ValueError):
            client.close()

    producers = [threading.Thread(target=put_on, args=(mine,)) for mine in confirmed]
    for producer in producers:
        producer.start()
    until = time.monotonic() + 60
    while sum(map(len, confirmed)) < 300:
        assert time.monotonic() < until
        time.sleep(0.01)
    server.kill()
    for producer in producers:
        producer.join()
    try:
        server.start()
        client = Tongue(number)
        for numbers in confirmed:
            for each in numbers:
                assert client.ask(b"peek %d\r\n" % each).startswith(b"FOUND ")
        client.close()
        assert server.end() == 0
    finally:
        server.close()


class _Failing(LmdbBroker):
    """Its disk fails once, after a job was handed out and the client has ``heard`` of it."""

    fails = True
    heard: threading.Event

    def exchange_early(self, step: Step, heard: LeaseCallback) -> Reply:
        def failing(leases: Sequence[Lease]) -> Sequence[Verdict]:
            verdicts = heard(leases)
            if self.fails and leases:
                self.fails = False
                assert self.heard.wait(30)  # who has not gets the job once more, and no word of it
                raise BrokerUnavailable("the disk is gone")
            return verdicts

        return super().exchange_early(step, failing)


@pytest.mark.parametrize("says", [b"", b"delete %d\r\n"])
def test_a_client_with_a_job_of_a_failed_commit_is_disconnected(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    monkeypatch.setattr(_Failing, "heard", threading.Event(), raising=False)
    monkeypatch.setattr(mill.broker, "__class__", _Failing)
    with port_of(mill) as port:
        client, other = Tongue(port.number), Tongue(port.number)
        number = client.put(b"x")
        client.send(b"reserve\r\n" + (says % number if says else b""))
        assert client.read() == b"RESERVED %d 1\r\nx" % number
        _Failing.heard.set()
        with contextlib.suppress(ConnectionError):
            assert client.read() == b""
        assert other.ask(b"reserve\r\n") == b"RESERVED %d 1\r\nx" % number
        assert other.ask(b"delete %d\r\n" % number) == b"DELETED"
        client.close()
        other.close()


# -- on every store ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "redis", "postgresql"])
def test_a_jobs_life_on_every_store(kind: str) -> None:
    url = "memory://" if kind == "memory" else NETWORK[kind](f"beanstalk_{new_id().lower()}")
    with Tidemill(url) as mill, port_of(mill) as port:
        client, other = Tongue(port.number), Tongue(port.number)
        first, second = client.put(b"first", pri=2), client.put(b"second", pri=1)
        later = client.put(b"later", delay=1000)
        assert client.ask(b"peek-ready\r\n") == b"FOUND %d 6\r\nsecond" % second
        assert client.ask(b"peek-delayed\r\n") == b"FOUND %d 5\r\nlater" % later
        assert client.ask(b"reserve\r\n") == b"RESERVED %d 6\r\nsecond" % second
        assert other.ask(b"delete %d\r\n" % second) == b"NOT_FOUND"
        assert client.ask(b"touch %d\r\n" % second) == b"TOUCHED"
        assert client.ask(b"release %d 3 0\r\n" % second) == b"RELEASED"
        assert other.ask(b"reserve\r\n") == b"RESERVED %d 5\r\nfirst" % first
        assert other.ask(b"bury %d 0\r\n" % first) == b"BURIED"
        assert client.ask(b"peek-buried\r\n") == b"FOUND %d 5\r\nfirst" % first
        assert client.ask(b"reserve-job %d\r\n" % first) == b"RESERVED %d 5\r\nfirst" % first
        assert client.ask(b"bury %d 0\r\n" % first) == b"BURIED"
        assert client.ask(b"kick 5\r\n") == b"KICKED 1"
        assert client.ask(b"kick-job %d\r\n" % later) == b"KICKED"
        facts = client.ask(b"stats-tube default\r\n")
        assert b"\ncurrent-jobs-urgent: 2\ncurrent-jobs-ready: 3\n" in facts
        assert other.ask(b"delete %d\r\n" % later) == b"DELETED"
        other.send(b"watch other\r\nreserve\r\nreserve\r\n")
        found = [other.read() for _ in range(3)]
        assert found[1:] == [b"RESERVED %d 5\r\nfirst" % first, b"RESERVED %d 6\r\nsecond" % second]
        other.close()
        assert client.ask(b"reserve\r\n") == b"RESERVED %d 5\r\nfirst" % first
        client.close()


@pytest.mark.parametrize("path", ["/", "/" + "x" * 435])
def test_a_web_page_cannot_drive_the_port(mill: Tidemill, port: PortHere, path: str) -> None:
    # case S15: given the POST of a page on another site, whose body holds commands
    body = b"put 0 0 60 4\r\nevil\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port.number}\r\nContent-Type: text/plain\r\n"
    # when a browser sends it to the port
    with socket.create_connection(("127.0.0.1", port.number), 10) as browser:
        browser.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        browser.settimeout(10)
        with contextlib.suppress(ConnectionError):
            while browser.recv(4096):
                pass
    # then the port has hung up and put nothing
    assert mill.queue("default").size() == 0


def test_tasks_are_delivered_only_if_the_port_serves_tasks(mill: Tidemill, client: Tongue) -> None:
    # given a task and a message in the default tube
    @mill.task(name="app.pay")
    def pay(amount: int) -> None: ...

    job = pay.enqueue(5)
    mill.queue("default").put("a message")
    number = int(client.ask(b"peek-ready\r\n").split()[1])
    # when a client reserves, names the task, and deletes it
    assert client.ask(b"reserve-with-timeout 0\r\n").endswith(b"a message")
    assert client.ask(b"reserve-with-timeout 0\r\n") == b"TIMED_OUT"
    assert client.ask(b"reserve-job %d\r\n" % number) == b"NOT_FOUND"
    assert client.ask(b"delete %d\r\n" % number) == b"NOT_FOUND"
    # then the task still waits for a worker
    assert job.refresh().state == "ready"
