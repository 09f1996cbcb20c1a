"""For the tests of messages: take all messages, and act a moment later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tidemill import Tidemill


def bodies(mill: Tidemill, *queues: str) -> list[Any]:
    """Take everything, one by one, and acknowledge it."""
    found = []
    while (message := mill.get(queues or ["q"], 0)) is not None:
        found.append(message.body)
        assert message.ack()
    return found


def later(seconds: float, call: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer
