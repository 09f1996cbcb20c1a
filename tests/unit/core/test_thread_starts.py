"""A thread that cannot be started now: its call fails, and later calls are made."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tidemill.client.threads import Threads


class Refused:
    """Refuses to start threads while ``refuses`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = True
        start = threading.Thread.start

        def refusing(thread: threading.Thread) -> None:
            if self.refuses and thread.name.startswith("tidemill-"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refusing)


def test_a_call_fails_when_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a pool without threads, on a system that has none to give.
    refused, threads = Refused(monkeypatch), Threads("test", 4)

    async def call() -> list[Any]:
        # When a call is made; then it fails at once.
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await threads.run(int, "1")
        # And when threads can be started again, calls are made, and not the failed one.
        refused.refuses = False
        return [await asyncio.wait_for(threads.run(int, text), 60) for text in ("2", "3")]

    assert asyncio.run(call()) == [2, 3]
    threads.close()
