"""For the tests of messages with ttr=0: stores, a steady producer, and clients that leave."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers import NETWORK, rabbitmq_url

from tidemill import Tidemill
from tidemill.core.clock import new_id

STORES: dict[str, Callable[[Path], str]] = {
    "lmdb": lambda path: f"lmdb://{path}/store",
    "redis": lambda path: NETWORK["redis"](f"once{new_id()}"),
    "postgresql": lambda path: NETWORK["postgresql"](f"once{new_id()}"),
    "rabbitmq": lambda path: f"{rabbitmq_url()}?prefix={new_id()[-20:]}&patience=60",
}
"""By broker: the url of a fresh store that several processes may use."""


@contextmanager
def producer(mill: Tidemill, bodies: range, pause: float = 0.002) -> Iterator[threading.Thread]:
    """Put messages with ttr=0 one by one, after random pauses."""

    def put() -> None:
        random_ = random.Random(1)
        for body in bodies:
            mill.queue("q").put(body, ttr=0)
            time.sleep(random_.random() * pause)

    thread = threading.Thread(target=put)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(60)


def all_of(mill: Tidemill, got: list[Any], many: int) -> list[Any]:
    """Messages delivered and messages left in the queue, in order; ``many`` are expected.

    A message may be on its way back for a while: a broker pushes it, or a call that was cancelled
    takes it, and gives it back. The busier the machine is, the longer that takes.
    """
    found = list(got)
    while len(found) < many and (message := mill.queue("q").get(60)) is not None:
        found.append(message.body)
    while (message := mill.queue("q").get(timeout=0)) is not None:
        found.append(message.body)
    return sorted(found)


class Poller:
    """Polls of one client of a job server, one after the other."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.got: list[Any] = []

    def poll(self, timeout: float, leave: float | None = None) -> bool:
        """Poll; the client leaves after ``leave`` seconds. False when the server has ended.

        The client shuts its half of the connection and reads to the end, so that every answer which
        was written counts.
        """
        body = json.dumps({"queues": ["q"], "timeout": timeout}).encode()
        try:
            sock = socket.create_connection(("127.0.0.1", self._port), 60)
        except OSError:
            return False
        with sock:
            head = "POST /v1/reserve HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
            try:
                sock.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                if leave is not None:
                    time.sleep(leave)
                    sock.shutdown(socket.SHUT_WR)
                response = http.client.HTTPResponse(sock)
                response.begin()
                data = response.read()
            except (OSError, http.client.HTTPException):
                return leave is not None
            if response.status == 200:
                self.got += [job["body"] for job in json.loads(data)["jobs"]]
            return True


def in_threads(works: list[Callable[[], None]]) -> list[threading.Thread]:
    """Run each in a thread of its own."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    return threads
