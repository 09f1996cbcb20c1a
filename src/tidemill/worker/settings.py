"""The settings of a worker, as its command line gives them."""

from __future__ import annotations

import os

import msgspec

from tidemill.brokers.contract.exchange import Mode
from tidemill.core.config import check_name


class Waits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For how many seconds a worker waits before it acts.

    Attributes:
        stuck: until an interrupted job counts as stuck.
        silent: past a deadline, until a process that does not report its job counts as stuck.
        reap: until a process that has closed its socket is killed.
        kill: until the log says that a process outlives its SIGKILL.
        retry: between two tries to reach a broker that does not answer.
        refused: without numbers for the history, after the store has refused a step.
    """

    stuck: float = 0.4
    silent: float = 0.55
    reap: float = 1.0
    kill: float = 5.0
    retry: float = 1.0
    refused: float = 30.0


def _waits() -> Waits:
    """The waits in $TIDEMILL_WAITS, a JSON object that only tests set; else the usual waits."""
    return msgspec.json.decode(os.environ.get("TIDEMILL_WAITS") or "{}", type=Waits)


def _release() -> str:
    text = os.environ.get("TIDEMILL_RELEASE", "")
    return check_name("TIDEMILL_RELEASE", text) if text else ""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a worker. Durations are seconds, ``max_memory`` is bytes.

    A run that takes longer than ``slow`` is logged as slow; 0 turns this off. ``release`` names the
    version of the app's code in the history of the store. No option shows the ``waits``.
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
    slow: float = 0.0
    release: str = msgspec.field(default_factory=_release)
    waits: Waits = msgspec.field(default_factory=_waits)
