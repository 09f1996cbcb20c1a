"""Steps on a server that is out of memory: jobs are settled, and large results are dropped."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from tidemill.brokers.contract.exchange import Step
from tidemill.core.envelope import RESULT_NOT_KEPT
from tidemill.core.job import Verdict
from tidemill.errors import StoreFull

log = logging.getLogger("tidemill.redis")

_SAID_FOR = 60.0  # seconds between two log entries that results are not kept
_SMALL = 100  # bytes of a result that is kept in any case
_SHORT = 500  # bytes of an error that are kept in any case


class MemoryRoom:
    """Sends the steps of a broker, and shortens those that the server has no memory for."""

    def __init__(self, where: Callable[[], str]) -> None:
        """Set up; ``where`` returns the server's address."""
        self._where = where
        self._said_at = -math.inf

    def run(self, step: Step, send: Callable[[str, Step], Any]) -> Any:
        """Send a step by calling ``send`` with a verb, and with the step or a shorter one.

        A server that is out of memory refuses ``exchange_kept`` before it does anything.

        Raises:
            StoreFull: the server accepts no writes at all.
        """
        if not step.verdicts and not step.notes:
            return send("exchange", step)
        try:
            return send("exchange_kept", step)
        except StoreFull:
            short = replace(
                step,
                verdicts=[_shortened(verdict) for verdict in step.verdicts],
                notes=[replace(note, line="", text="") for note in step.notes],
            )
            answer = send("exchange", short)
        if any(len(verdict.result) > _SMALL for verdict in step.verdicts):
            self._log_loss()
        return answer

    def _log_loss(self) -> None:
        if time.monotonic() - self._said_at >= _SAID_FOR:
            self._said_at = time.monotonic()
            log.error(
                "redis at %s is out of memory (maxmemory): large results are not kept until there "
                "is room",
                self._where(),
            )


def _shortened(verdict: Verdict) -> Verdict:
    return replace(
        verdict,
        result=verdict.result if len(verdict.result) <= _SMALL else RESULT_NOT_KEPT,
        error=verdict.error.encode()[:_SHORT].decode(errors="ignore"),
        traceback="",
    )
