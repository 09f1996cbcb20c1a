"""A message whose consumers fail does not block its queue, and ends as failed."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from harness import SLACK, eventually

from tidemill import Queue, Retries, State, Tidemill
from tidemill.core.retry import MESSAGE

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "messages.md"
SMALL = Retries(2, delay=0.01, factor=1, jitter=False)


def consume(mill: Tidemill, until: Callable[[int], bool]) -> list[str]:
    """Take messages of queue q, fail at every poison, and return the bodies in order."""
    handed = list[str]()
    deadline = time.monotonic() + 60
    while not until(len(handed)):
        assert time.monotonic() < deadline, f"{len(handed)} deliveries"
        message = mill.queue("q").get(timeout=0.5)
        if message is None:
            continue
        handed.append(message.body)
        try:
            with message:
                if message.body == "poison":
                    raise ValueError("it never works")
        except ValueError:
            pass
    return handed


def test_the_messages_behind_a_poison_message_are_handed_out(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given the policy of messages, whose delay does not end while the test runs
    slow = msgspec.structs.replace(MESSAGE, delay=300.0)
    monkeypatch.setattr("tidemill.client.queues.MESSAGE", slow)
    orders = mill.queue("q")
    poison = orders.put("poison")
    orders.put_many([f"good {n}" for n in range(5)])

    handed = consume(mill, lambda count: count == 7)

    assert handed == ["poison", "poison", *(f"good {n}" for n in range(5))]
    record = poison.refresh()
    assert (record.state, record.attempt, record.max_attempts) == (State.SCHEDULED, 2, 20)


def test_a_poison_message_ends_as_failed_with_the_reason(mill: Tidemill) -> None:
    poison = mill.queue("q").put("poison", retries=SMALL)

    handed = consume(mill, lambda count: poison.state is State.FAILED)

    assert handed == ["poison"] * 3
    assert poison.error == "ValueError: it never works"


def test_a_number_of_retries_keeps_the_delays_of_a_message(mill: Tidemill) -> None:
    poison = mill.queue("q").put("poison", retries=2)

    consume(mill, lambda count: poison.state is State.FAILED)

    policy = poison.record.envelope.retries
    assert (policy.limit, policy.delay, policy.immediate) == (2, MESSAGE.delay, 1)


def test_the_policy_of_the_guide_returns_a_message_to_its_place_first(mill: Tidemill) -> None:
    for words in (inspect.getdoc(Queue.put) or "", GUIDE.read_text()):
        assert "Retries(5, delay=1, immediate=1, jitter=False)" in words
    # given that policy, with a delay that does not end while the test runs
    policy = Retries(5, delay=300, immediate=1, jitter=False)
    poison = mill.queue("q").put("poison", retries=policy)

    consume(mill, lambda count: count == 1)
    assert poison.state is State.READY
    consume(mill, lambda count: count == 1)

    record = poison.refresh()
    assert record.state is State.SCHEDULED
    assert 299.5 < record.due - record.attempts[-1].ended < 300 + SLACK


DYING = """
import os, signal, sys
from tidemill import Tidemill
message = Tidemill(sys.argv[1]).queue("q").get(timeout=30)
print(message.attempt, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_message_that_kills_its_consumers_ends_as_failed(tmp_path: Path) -> None:
    with Tidemill(f"lmdb://{tmp_path}/store") as mill:
        poison = mill.queue("q").put("poison", retries=SMALL)
        attempts = []
        for _ in range(3):
            dying = [sys.executable, "-c", textwrap.dedent(DYING), mill.url]
            died = subprocess.run(dying, capture_output=True, text=True, timeout=60, check=False)
            attempts.append(died.stdout.strip())

        mill.queue("q").get(timeout=0)
        assert eventually(lambda: poison.refresh().state is State.FAILED)
        assert attempts == ["1", "2", "3"]
        assert "died" in poison.error
