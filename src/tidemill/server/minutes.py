"""The server's work at the end of each minute: it keeps the totals of its store's queues.

Workers store snapshots of the queues; the clients of a server do not. So the server reads the
queues once a minute, and stores a snapshot if the queues have changed.
"""

from __future__ import annotations

import asyncio
import logging

from tidemill.app import Tidemill
from tidemill.client.queue_snapshots import QueueSnapshots
from tidemill.core.clock import clock
from tidemill.core.errors import TidemillError

log = logging.getLogger("tidemill.server")

LATE = 0.05
"""Seconds after the end of a minute at which the server looks."""


class Minutes:
    """The snapshots of one server."""

    def __init__(self, mill: Tidemill) -> None:
        self._mill = mill
        self._snapshots = QueueSnapshots()

    async def run(self) -> None:
        """Keep snapshots until cancelled; the first one at once."""
        while True:
            await self.keep()
            await asyncio.sleep(60.0 - clock.wall() % 60.0 + LATE)

    async def keep(self, *, ending: bool = False) -> None:
        """Keep a snapshot if the queues have changed."""
        mill = self._mill
        try:
            await mill.threaded(lambda: self._snapshots.keep_if_changed(mill.broker, ending=ending))
        except (TidemillError, OSError) as error:
            log.warning("the totals of queues are not kept for this minute: %s", error)
