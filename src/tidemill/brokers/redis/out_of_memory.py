"""Steps on a server that is out of memory: jobs are settled, and results kept if they fit."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from tidemill.brokers.contract.exchange import Step
from tidemill.core.errors import StoreFull

log = logging.getLogger("tidemill.redis")

_SAID_FOR = 60.0
"""Seconds between two log entries that results are not kept."""

_PRESSED_FOR = 1.0
"""Seconds for which a server counts as full after it refused a step."""

_NOT_KEPT = ord("2")  # settled, and the result was not kept
_LOST = ord("0")


class MemoryRoom:
    """Chooses the verb for each step of a broker; ``lua/out_of_memory.lua`` has the verbs."""

    def __init__(self, where: Callable[[], str]) -> None:
        """Set up; ``where`` returns the server's address."""
        self._where = where
        self._pressed_until = 0.0
        self._said_at = -math.inf

    def run(self, step: Step, send: Callable[[str], Any]) -> Any:
        """Run a step by calling ``send`` with the verb that fits.

        Raises:
            StoreFull: the server accepts no writes at all.
        """
        if not step.verdicts and not step.notes:
            return send("exchange")
        if time.monotonic() >= self._pressed_until:
            try:
                return send("exchange_kept")
            except StoreFull:
                self._pressed_until = time.monotonic() + _PRESSED_FOR
        return send("exchange_pressed")

    def settled(self, flags: Iterable[int]) -> list[bool]:
        """Whether each verdict was settled; log an error when results were not kept."""
        told = list(flags)
        if _NOT_KEPT in told and time.monotonic() - self._said_at >= _SAID_FOR:
            self._said_at = time.monotonic()
            log.error(
                "redis at %s is nearly out of memory (maxmemory): finished jobs are pruned early, "
                "and results are not kept, until there is room",
                self._where(),
            )
        return [flag != _LOST for flag in told]
