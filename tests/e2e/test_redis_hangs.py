"""A Redis master that hangs: calls leave it when Sentinel names another, and not before."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from harness import LIMIT, SLACK, eventually, opened
from servers import Redis, Sentinel

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable

PATIENCE = 120


def watched(stack: contextlib.ExitStack) -> tuple[Redis, Redis, Sentinel, str]:
    """A master, its replica, their sentinel, and the url of a store there.

    The test tells the sentinel when to change the master; no clock does.
    """
    master = stack.enter_context(contextlib.closing(Redis()))
    replica = Redis("--replicaof", "127.0.0.1", str(master.port))
    stack.callback(replica.close)
    follows = "master_link_status:up"
    eventually(lambda: follows in replica.run("INFO", "replication"), "the replica follows")
    sentinel = Sentinel(master.port, down_after=600, abort_after=60)
    stack.callback(sentinel.close)
    known = "num-slaves\n1"
    eventually(lambda: known in sentinel.run("SENTINEL", "MASTER", "mymaster"), "it is known")
    vanished = "127.0.0.1:9"  # a sentinel on a machine that is gone
    hosts = f"{vanished},127.0.0.1:{sentinel.port}"
    options = f"patience={PATIENCE}&owner_lease=3600"
    return master, replica, sentinel, f"redis+sentinel://{hosts}/mymaster/0?{options}"


def test_calls_and_sleepers_go_to_the_promoted_replica_when_the_master_hangs(
    stack: contextlib.ExitStack,
) -> None:
    master, replica, sentinel, url = watched(stack)
    worker, producer = opened(stack, url), opened(stack, url)
    worker.attach(Owner(id="w", name="w"))
    assert worker.exchange(Step("w", want=Want(1, ("default",), sleep=True))).leases == []
    taken: list[str] = []
    sleeper = threading.Thread(target=lambda: taken.extend(sleep_and_take(worker)))
    sleeper.start()
    producer.put([Envelope(id="other", task="t", queue="other")])
    offset = r"master_repl_offset:(\d+)"
    written = int(re.findall(offset, master.run("INFO", "replication"))[0])
    eventually(
        lambda: int(re.findall(offset, replica.run("INFO", "replication"))[0]) >= written,
        "the replica has all",
    )
    # when
    stack.enter_context(master.stalled())
    fail_over(sentinel)
    began = time.monotonic()
    producer.put([Envelope(id="a", task="t")])
    took = time.monotonic() - began
    sleeper.join(LIMIT)
    # then
    assert took < PATIENCE / 2
    assert taken == ["a"]
    assert "role:master" in replica.run("INFO", "replication")
    assert replica.run("HGET", "{tidemill}:q:default", "accepted") == "1"


def fail_over(sentinel: Sentinel) -> None:
    """Have the replica promoted; on a busy machine the sentinel may have to hear of it first."""
    command = "SENTINEL", "FAILOVER", "mymaster"
    eventually(lambda: sentinel.run(*command) == "OK", "the replica may be promoted", pause=0.2)


def sleep_and_take(worker: Broker) -> list[str]:
    """Sleep without a tick of the lease, and take what there is on waking."""
    while True:
        try:
            reply = worker.exchange(Step("w", want=Want(1, ("default",), sleep=True)))
            if reply.leases:
                return [lease.open().id for lease in reply.leases]
            worker.wait("w", 1000.0)
        except BrokerUnavailable:
            time.sleep(0.1)


def test_a_slow_master_keeps_its_calls(stack: contextlib.ExitStack) -> None:
    # law 5: Sentinel is asked, and names the same server
    master, _, _, url = watched(stack)
    broker = opened(stack, url)
    broker.put([Envelope(id="a", task="t")])
    before = clients(master)
    server, named = broker._lines.server, list[tuple[str, int]]()
    stack.enter_context(pytest.MonkeyPatch.context()).setattr(
        server, "_ask_sentinels", listened(server._ask_sentinels, named)
    )
    putting = threading.Thread(target=broker.put, args=([Envelope(id="b", task="t")],))
    # when
    with master.stalled():
        putting.start()
        eventually(lambda: named, "the answer of the sentinel")
        assert putting.is_alive()
    putting.join(LIMIT)
    # then
    assert set(named) == {("127.0.0.1", master.port)}
    assert server.changes == 0
    assert before <= clients(master)
    assert broker.stats()[0].accepted == 2


def listened(ask: Callable[[float], tuple[str, int]], heard: list[Any]) -> Any:
    """A question to the sentinels whose answers a test hears."""

    def asks(until: float) -> tuple[str, int]:
        answer = ask(until)
        heard.append(answer)
        return answer

    return asks


def clients(server: Redis) -> set[str]:
    """The connections on which functions were called."""
    lines = server.run("CLIENT", "LIST", "TYPE", "normal").splitlines()
    return {line.split()[0] for line in lines if "cmd=fcall" in line}


def test_patience_is_a_hanging_servers_time(stack: contextlib.ExitStack) -> None:
    # on a server without Sentinel, too: not once for each attempt
    server = stack.enter_context(contextlib.closing(Redis()))
    broker = opened(stack, f"{server.url}?patience=10")
    broker.put([Envelope(id="a", task="t")])
    stack.enter_context(server.stalled())
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        broker.put([Envelope(id="b", task="t")])
    assert 9.9 < time.monotonic() - began < 10 + SLACK
