"""The server's waits for the ends of jobs, which many callers share."""

from __future__ import annotations

import asyncio
import contextlib

from in_loop import in_loop

from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.server.http.waits import Waits


@in_loop
async def test_a_second_close_of_the_waits_does_nothing() -> None:
    with contextlib.closing(open_broker("memory://")) as broker:
        broker.put([Envelope(id="a")])
        waits = Waits(broker)
        wait = asyncio.ensure_future(waits.until_ended(["a"], 60))
        await asyncio.sleep(0)
        await waits.close()
        await waits.close()
        await wait
