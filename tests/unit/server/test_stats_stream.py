"""The stream of statistics: listeners share the bytes, and slow ones keep few old snapshots."""

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


@pytest.mark.parametrize(("old", "survives"), [(10, False), (1 << 20, True)])
@in_loop
async def test_listeners_of_too_many_old_snapshots_are_cut_off(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch, old: int, survives: bool
) -> None:
    monkeypatch.setattr(module, "EVERY", 0.02)
    monkeypatch.setattr(module, "OLD", old)
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
    await until(lambda: len(quick) > 1)
    # then the first is cut off if what it keeps is too large
    await asyncio.sleep(0.1)
    assert stuck.done() is not survives
    assert not follows.done()
    for task in (stuck, follows):
        task.cancel()
    await asyncio.wait([stuck, follows])
