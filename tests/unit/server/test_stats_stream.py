"""The stream of statistics: listeners share the bytes, and none waits for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from in_loop import in_loop

from tidemill import Tidemill
from tidemill.server.http import stats_stream as module
from tidemill.server.http.stats_stream import StatsStream


async def take(snapshots: StatsStream, got: list[bytes], pause: float) -> None:
    async for event in snapshots.listen():
        got.append(event)
        await asyncio.sleep(pause)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


@in_loop
async def test_a_slow_listener_shares_its_bytes_and_holds_up_nobody(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY", 0.02)
    snapshots = StatsStream(mill, ended=lambda: False)
    slow: list[bytes] = []
    quick: list[bytes] = []
    # given a listener that never takes the whole of its first event, and one that does
    stuck = asyncio.ensure_future(take(snapshots, slow, 3600))
    follows = asyncio.ensure_future(take(snapshots, quick, 0))
    await until(lambda: bool(slow and quick))
    assert slow[0] is quick[0]
    # when the queues change
    await mill.queue("q").aput(1)
    # then the second hears of it
    await until(lambda: len(quick) > 1)
    assert b'"accepted":1' in quick[-1]
    assert len(slow) == 1
    for task in (stuck, follows):
        task.cancel()
    await asyncio.wait([stuck, follows])
