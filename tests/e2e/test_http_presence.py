"""A killed consumer over ``http://``: its messages come back soon, whatever their ttr."""

from __future__ import annotations

import signal
import subprocess
import sys

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


def consumer(server: JobServer, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONSUMER, server.url, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_messages_of_a_killed_consumer_come_back_within_seconds(server: JobServer) -> None:
    # law 5: given a message with a ttr of an hour, and a consumer that is killed with it
    with Tidemill(server.url) as mill:
        job = mill.queue("q").put("x", ttr=3600)
        with consumer(server, 3600) as killed:
            assert killed.stdout.readline().strip() == job.id
            killed.send_signal(signal.SIGKILL)
        # Then another consumer gets the message.
        message = mill.queue("q").get(timeout=30)
        assert message.id == job.id
        assert message.attempt == 2
        message.ack()
