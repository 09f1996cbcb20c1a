"""A put that waits for a silent server, and one whose server has hung up."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kinds import KINDS, Kind
from servers import Proxy

from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope

NETWORK = [kind for kind in KINDS if kind.name in ("redis", "postgresql", "rabbitmq", "http")]
PATIENCE = 40.0


class Alarm(TimeoutError):
    """What a timeout by ``signal.alarm`` raises."""


@pytest.fixture(params=NETWORK, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


class Way:
    """A store behind a proxy; ``url`` leads through it."""

    def __init__(self, url: str) -> None:
        found = re.search(r"127\.0\.0\.1:(\d+)", url)
        self._port = int(found[1])
        self.proxy = Proxy(self._port)
        self.url = url.replace(found[0], f"127.0.0.1:{self.proxy.port}")
        self.url += f"{'&' if '?' in self.url else '?'}patience={PATIENCE:g}"

    def hang_up(self) -> None:
        """Close all connections; new ones go through."""
        self.proxy.close()
        self.proxy = Proxy(self._port, self.proxy.port)


@pytest.fixture
def way(kind: Kind, tmp_path: Path) -> Iterator[Way]:
    way = Way(kind.store_url(tmp_path, ""))
    yield way
    way.proxy.close()


@pytest.fixture
def press() -> Iterator[Callable[[], None]]:
    """Have a signal come soon, until its handler has raised."""
    noticed, main = threading.Event(), threading.main_thread().ident or 0

    def raising(*_: object) -> None:
        if not noticed.is_set():
            noticed.set()
            raise Alarm

    def work() -> None:
        while not noticed.wait(0.3):
            signal.pthread_kill(main, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, raising)
    thread = threading.Thread(target=work)
    yield thread.start
    noticed.set()
    thread.join(10)
    signal.signal(signal.SIGALRM, before)


def job() -> Envelope:
    return Envelope(id=new_id(), task="t")


def test_a_handler_ends_a_put_at_once_that_waits_for_its_server(
    way: Way, press: Callable[[], None]
) -> None:
    # given
    broker = open_broker(way.url)
    broker.put([job()])
    way.proxy.cut()
    # when
    begun = time.monotonic()
    press()
    with pytest.raises(Alarm):
        broker.put([job()])
    # then
    assert time.monotonic() - begun < PATIENCE / 2
    way.proxy.mend()
    assert broker.put([job()])
    broker.close()


PRODUCER = """
import signal, sys
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Envelope
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
broker = open_broker(sys.argv[1])
for count in (1, 6, 1):
    broker.put([Envelope(id=new_id(), task="t", body=bytes(1_000_000)) for _ in range(count)])
    print("put", flush=True)
    sys.stdin.readline()
"""


def test_a_producer_with_sigpipe_at_its_default_survives_a_server_that_hangs_up(way: Way) -> None:
    command = [sys.executable, "-c", PRODUCER, way.url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as producer:  # type: ignore[call-overload]
        for _ in range(3):
            assert producer.stdout.readline() == "put\n", f"it ended with {producer.wait()}"
            way.hang_up()
            producer.stdin.write("\n")
            producer.stdin.flush()
        producer.stdin.close()
        assert producer.wait(60) == 0
