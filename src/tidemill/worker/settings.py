"""The settings of a worker, as its command line gives them."""

from __future__ import annotations

import os

import msgspec

from tidemill.brokers.contract.exchange import Mode

__all__ = ["Settings"]


def _grace() -> float | None:
    """The value of $TIDEMILL_UNKNOWN_GRACE, if set."""
    text = os.environ.get("TIDEMILL_UNKNOWN_GRACE", "")
    return float(text) if text else None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker. Durations are seconds, ``max_memory`` is bytes.

    ``unknown_grace`` is how long a job of an unknown task is kept before it fails; None for ever.
    """

    app: str = ""
    processes: int = 1
    concurrency: int = 8
    queues: tuple[str, ...] = ()
    mode: Mode = Mode.FAIR
    burst: bool = False
    stuck_grace: float = 60.0
    shutdown_timeout: float = 30.0
    max_jobs: int = 0
    max_memory: int = 0
    name: str = ""
    unknown_grace: float | None = msgspec.field(default_factory=_grace)
