"""Remote owners: the store counts an owner as dead when it is silent for its lease.

The process that receives the owner's calls must measure the silence, and this process is the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from tidemill.brokers.contract.store import Store
from tidemill.core.errors import TidemillError

log = logging.getLogger("tidemill.server")

_RETRY = 1.0
"""Seconds until the next attempt after an error of the store."""


async def give_up_silent_owners(broker: Store, stopping: asyncio.Event) -> None:
    """Have the store count the silence of remote owners until the server stops."""
    while not stopping.is_set():
        try:
            seconds = await asyncio.to_thread(broker.count_silence)
        except TidemillError as error:
            log.warning("%s; trying again", error)
            seconds = _RETRY
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), seconds)
