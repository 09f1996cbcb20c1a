"""The private RabbitMQ of other tests keeps its data over a kill and leaves no process."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pika
import psutil
import pytest
from harness import alive, eventually
from pika.adapters.blocking_connection import BlockingChannel
from servers import Machine, Proxy, RabbitMQ, may_have_machines
from servers.base import lacks

TAKER = """
import sys, pika
channel = pika.BlockingConnection(pika.URLParameters(sys.argv[1])).channel()
channel.basic_consume("q", lambda *_: print("taken", flush=True))
channel.start_consuming()
"""
"""A consumer that acks nothing of what it takes."""


@contextlib.contextmanager
def channel_to(url: str) -> Iterator[BlockingChannel]:
    """A channel with confirms of a connection of its own, and an empty queue ``q``."""
    options = "heartbeat=0&blocked_connection_timeout=30"
    connection = pika.BlockingConnection(pika.URLParameters(f"{url}?{options}"))
    try:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("q", durable=True)
        yield channel
    finally:
        connection.close()


def put(channel: BlockingChannel, body: bytes) -> None:
    """Until it is confirmed."""
    channel.basic_publish("", "q", body, pika.BasicProperties(delivery_mode=2))


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQ]:
    server = RabbitMQ("heartbeat = 1")
    yield server
    server.close()


def test_confirmed_messages_survive_a_kill_and_the_rig_leaves_no_process() -> None:
    server = RabbitMQ()
    try:
        with channel_to(server.url) as channel:
            server.sync()
            put(channel, b"kept")
        family = psutil.Process(server.pid).children(recursive=True)
        # when
        server.kill()
        eventually(lambda: not any(alive(child.pid) for child in family), "the end of all")
        server.start()
        # then: on the same port and data
        assert server.queues()["q"]["messages"] == 1
        with channel_to(server.url) as channel:
            assert channel.basic_get("q", auto_ack=True)[2] == b"kept"
        server.delete_queue("q")
        assert server.queues() == {}
    finally:
        server.close()
    assert not server.path.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_an_alarm_stops_publishers_until_it_is_over(server: RabbitMQ) -> None:
    with channel_to(server.url) as channel:
        server.alarm(True)
        # The first may still be confirmed: it is how the server learns that somebody publishes.
        publisher = threading.Thread(target=lambda: [put(channel, body) for body in (b"1", b"2")])
        publisher.start()
        states = "[io:write(State) || State <- rabbit_networking:connection_info_all([state])]"
        eventually(lambda: "blocked" in server.eval(states), "the alarm")
        assert publisher.is_alive()
        # when
        server.alarm(False)
        # then
        publisher.join(30)
        assert not publisher.is_alive()
        assert server.queues()["q"]["messages_ready"] == 2
        channel.queue_delete("q")


@pytest.fixture(params=["proxy", "machine"])
def line(
    request: pytest.FixtureRequest, server: RabbitMQ, tmp_path: Path
) -> Iterator[tuple[RabbitMQ, Proxy | Machine, Sequence[str]]]:
    """A server, a line to it, and how to run something at its other end with the url there."""
    if request.param == "proxy":
        proxy = Proxy(server.port)
        url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
        yield server, proxy, [sys.executable, "-c", TAKER, url]
        proxy.close()
        return
    if not may_have_machines():
        lacks("network namespaces are not permitted here: run the tests as root")
    with contextlib.ExitStack() as stack:
        machine = Machine("far", tmp_path / "far")
        stack.callback(machine.close)
        near = RabbitMQ("heartbeat = 1", hosts=[machine.host])
        stack.callback(near.close)
        url = near.url.replace("127.0.0.1", machine.host)
        yield near, machine, [*machine.under, sys.executable, "-c", TAKER, url]


def test_a_link_can_go_down_silently(
    line: tuple[RabbitMQ, Proxy | Machine, Sequence[str]],
) -> None:
    """The server hears no heartbeats, and what the one at the other end held is ready again."""
    server, link, command = line
    with channel_to(server.url) as channel:
        put(channel, b"x")
        taker = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert taker.stdout is not None
            assert taker.stdout.readline() == b"taken\n"
            assert server.queues()["q"]["messages_unacknowledged"] == 1
            # when
            link.cut()
            # then
            eventually(lambda: server.queues()["q"]["consumers"] == 0, "missing it")
            assert server.queues()["q"]["messages_ready"] == 1
            link.mend()
            assert taker.wait(30) != 0  # it heard none either, or learns now that it was given up
        finally:
            taker.kill()
            taker.wait()
            taker.stdout.close()
        channel.queue_delete("q")
