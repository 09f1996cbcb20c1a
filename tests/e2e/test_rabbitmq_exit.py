"""A process that ends without closing the app: RabbitMQ has its acknowledgements all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness import eventually
from servers import RabbitMQ

from tidemill import Tidemill

CONSUMER = """
import sys

from tidemill import Tidemill

queue = Tidemill(sys.argv[1]).queue("orders")
messages = [queue.get(timeout=30) for _ in range(6)]
for message in messages:
    assert {call}
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQ]:
    server = RabbitMQ()
    yield server
    server.close()


@pytest.mark.parametrize("how", range(2))
@pytest.mark.parametrize("call", ["message.ack()", "message.bury('damaged')"])
def test_verdicts_of_a_process_that_ends_without_close_are_kept(
    server: RabbitMQ, call: str, how: int
) -> None:
    with Tidemill(f"{server.url}?prefix=exit{how}{call[8]}") as mill:
        queue = mill.queue("orders")
        for number in range(6):
            queue.put(number)
        script = CONSUMER.format(call=call)
        subprocess.run([sys.executable, "-c", script, mill.url], check=True, timeout=60)
        buried = 6 if "bury" in call else 0
        eventually(lambda: len(list(mill.jobs(state="failed"))) == buried, "the failed jobs")
        eventually(lambda: mill.queues()[0].ready == 0, "nothing is left")
        assert queue.get(timeout=0) is None
