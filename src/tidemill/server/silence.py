"""Owners elsewhere that are silent for their lease: given up from here, where they are heard."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from tidemill.brokers.base import Broker
from tidemill.errors import TidemillError

__all__ = ["count_silence"]

log = logging.getLogger("tidemill.server")

_AGAIN = 1.0  # seconds


async def count_silence(broker: Broker, stopping: asyncio.Event) -> None:
    """Have the store count until the server stops."""
    while not stopping.is_set():
        try:
            seconds = await asyncio.to_thread(broker.count_silence)
        except TidemillError as error:
            log.warning("%s; trying again", error)
            seconds = _AGAIN
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), seconds)
