"""A thread that cannot be started now: calls fail or wait, later calls are made."""

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


def test_a_call_waits_for_a_thread_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a pool whose only thread is busy, on a system that has no more to give.
    refused, threads = Refused(monkeypatch), Threads("test", 4)
    refused.refuses = False
    busy, go_on = threading.Event(), threading.Event()
    threads.start(lambda: (busy.set(), go_on.wait(60)))
    assert busy.wait(60)
    refused.refuses = True

    async def call() -> int:
        # When a call is made; then it waits for the thread, and no place of the pool is lost.
        waiting = asyncio.create_task(threads.run(int, "1"))
        await asyncio.sleep(0)
        assert not threads.is_full
        go_on.set()
        return await asyncio.wait_for(waiting, 60)

    assert asyncio.run(call()) == 1
    threads.close()
