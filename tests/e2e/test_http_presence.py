"""A killed consumer over ``http://``: its messages come back soon, whatever their ttr."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest
from servers.http import JobServer

from tidemill import Tidemill

CONSUMER = """
import sys, time
from tidemill import Tidemill
mill = Tidemill(sys.argv[1])
message = mill.queue("q").get(timeout=30)
print(message.id, flush=True)
time.sleep(float(sys.argv[2]))
print(message.ack(), flush=True)
"""


@pytest.fixture
def server() -> Iterator[JobServer]:
    server = JobServer("--quiet")
    yield server
    server.close()


def consumer(server: JobServer, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONSUMER, server.url, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_messages_of_a_killed_consumer_come_back_within_seconds(server: JobServer) -> None:
    # law 5: given a message with a ttr of an hour, and a consumer that is killed with it
    with Tidemill(server.url) as mill:
        job = mill.queue("q").put("x", ttr=3600)
        with consumer(server, 3600) as killed:
            assert killed.stdout is not None
            assert killed.stdout.readline().strip() == job.id
            killed.send_signal(signal.SIGKILL)
        # Then another consumer gets the message.
        message = mill.queue("q").get(timeout=30)
        assert message is not None
        assert message.id == job.id
        assert message.attempt == 2
        message.ack()


def test_a_consumer_that_works_on_a_message_for_long_keeps_the_message(server: JobServer) -> None:
    # law 5: given a consumer that says nothing for longer than the grace, and lives
    with Tidemill(server.url) as mill:
        job = mill.queue("q").put("x", ttr=3600)
        with consumer(server, 12) as busy:
            assert busy.stdout is not None
            assert busy.stdout.readline().strip() == job.id
            # Then nobody else gets the message, and the consumer can acknowledge it.
            assert mill.queue("q").get(timeout=10) is None
            assert busy.stdout.readline().strip() == "True"


def test_plain_clients_keep_their_ttr(server: JobServer) -> None:
    # Given a message that a plain client reserved over a connection that has closed.
    with Tidemill(server.url) as mill:
        mill.queue("q").put("x", ttr=3600)
        body = json.dumps({"queues": ["q"], "timeout": 5}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/reserve", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)
        began = time.monotonic()
        # Then the message stays reserved past the grace of a consumer's session.
        assert mill.queue("q").get(timeout=10) is None
        assert time.monotonic() - began >= 9
