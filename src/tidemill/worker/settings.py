"""How a worker is to be, as its command line says."""

from __future__ import annotations

import msgspec

from tidemill.brokers.base import Mode

__all__ = ["Settings"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is to be. Durations are seconds, ``max_memory`` is bytes."""

    app: str = ""
    processes: int = 1
    concurrency: int = 8
    queues: tuple[str, ...] = ()
    mode: Mode = Mode.FAIR
    burst: bool = False
    drain: float = 5.0
    shutdown_timeout: float = 30.0
    max_jobs: int = 0
    max_memory: int = 0
    name: str = ""
