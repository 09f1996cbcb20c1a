"""The layout of the server: names of queues and exchanges, and the arguments that declare them.

    PREFIX.tasks.normal.QUEUE      ready jobs of a queue; likewise tasks.high and tasks.low
    PREFIX.tasks.suspect.QUEUE     suspects: jobs that may have killed their workers
    PREFIX.messages.normal.QUEUE   raw messages, likewise
    PREFIX.tasks.classic.QUEUE     with queues=classic: one queue, with priorities
    PREFIX.failed                  jobs that failed for good, for a human
    PREFIX.queues                  a stream: the names of all queues that were ever used
    PREFIX.timer.LEVEL             delayed jobs; the header ``home`` names the place of each due job
    PREFIX.timers                  the levels in use, one message each; the worker that takes the
                                   message serves the queue of that level

Workers hold the jobs of timer queues until they are due (:mod:`.timekeeper`). While no worker runs,
these jobs wait. Each timer queue is for a range of delays: below 0.5 s, from 0.5 to 1 s, from 1 to
2 s, and so on. A job in a timer queue waits at least for the least delay of the range.

Here, a queue of the server is called a *place*: a queue of tidemill has several places.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Final

import msgspec

from tidemill.core.envelope import Envelope, priority_of
from tidemill.errors import InvalidOption

_KINDS, _BANDS = ("tasks", "messages"), ("high", "normal", "low")

CLASSIC_PRIORITIES = 20
"""The highest priority of a classic queue. The server's priority 10 is priority 0 of tidemill, and
each step of the server is ten steps of tidemill."""

FAILED_KEPT, FAILED_MOST = 30 * 86400.0, 100_000
"""Seconds and messages that the place of failed jobs keeps; the oldest go first."""

NEVER = 1_000_000_000
"""A delivery limit that no message reaches. In a queue with a delivery limit, returned messages go
to the front, in their order. Without a limit they go to the end."""

_STREAM_BYTES, _SEGMENT_BYTES = 4_000_000, 500_000


class Place(msgspec.Struct, frozen=True):
    """A queue of the server."""

    name: str  # its name on the server
    arguments: dict[str, Any]  # the arguments that declare the place
    queue: str = ""  # its queue of tidemill
    alone: bool = False  # whether each of its jobs runs alone
    listed: bool = False  # whether workers serve the place only after a notice: a timer queue

    def __hash__(self) -> int:
        return hash(self.name)


def is_pattern(queue: str) -> bool:
    """Whether the server would read the name of a queue as a pattern of names."""
    return "*" in queue or "#" in queue


class Names(msgspec.Struct, frozen=True):
    """The names under a prefix."""

    prefix: str
    classic: bool

    def of(self, queue: str, kind: str) -> list[Place]:
        """All places of a queue, most urgent first."""
        names = ("classic",) if self.classic else _BANDS
        bands = [_place_of(self, queue, kind, band) for band in names]
        return [self.suspect(queue), *bands] if kind == "tasks" else bands

    def suspect(self, queue: str) -> Place:
        """The place of tasks that must run alone."""
        return _place_of(self, queue, "tasks", "suspect")

    def home(self, job: Envelope) -> Place:
        """The place of a job when it is ready."""
        kind = "messages" if job.is_message else "tasks"
        if self.classic:
            return _place_of(self, job.queue, kind, "classic")
        priority = priority_of(job.rank)
        band = "normal" if priority == 0 else "high" if priority > 0 else "low"
        return _place_of(self, job.queue, kind, band)

    def named(self, name: str) -> Place | None:
        """The place with this name on the server; None for a place without ready jobs."""
        parts = name.removeprefix(f"{self.prefix}.").split(".", 2)
        if len(parts) < 3 or parts[0] not in _KINDS or is_pattern(name):
            return None
        kind, band, queue = parts
        if band == "suspect":
            return self.suspect(queue)
        names = Names(self.prefix, band == "classic")
        return _place_of(names, queue, kind, band) if band in (*_BANDS, "classic") else None

    @property
    def failed(self) -> Place:
        arguments = {
            "x-queue-type": "quorum",
            "x-message-ttl": int(FAILED_KEPT * 1000),
            "x-max-length": FAILED_MOST,
            # Each look at the failed jobs counts as a delivery, and people may look many times.
            "x-delivery-limit": NEVER,
        }
        return Place(f"{self.prefix}.failed", arguments)

    @property
    def registry(self) -> Place:
        """The stream of queue names."""
        arguments = {
            "x-queue-type": "stream",
            "x-max-length-bytes": _STREAM_BYTES,
            "x-stream-max-segment-size-bytes": _SEGMENT_BYTES,
        }
        return Place(f"{self.prefix}.queues", arguments)

    def timer(self, level: int) -> Place:
        return _timer_of(self, str(level))

    @property
    def timers_in_use(self) -> Place:
        """The queue that lists the levels in use."""
        return _timer_of(self, "")


@functools.lru_cache(maxsize=1000)
def _timer_of(names: Names, level: str) -> Place:
    # Each return counts as a delivery: workers return held messages from time to time.
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": NEVER, **safe(names.failed)}
    if not level:
        return Place(f"{names.prefix}.timers", arguments)
    return Place(f"{names.prefix}.timer.{level}", arguments, listed=True)


@functools.lru_cache(maxsize=10_000)
def _place_of(names: Names, queue: str, kind: str, band: str) -> Place:
    if is_pattern(queue):
        raise InvalidOption(f"queue {queue!r} has a * or #, which RabbitMQ reads as a pattern")
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": NEVER}
    if names.classic:
        arguments = {"x-queue-type": "classic", "x-max-priority": CLASSIC_PRIORITIES}
    name = f"{names.prefix}.{kind}.{band}.{queue}"
    arguments |= safe(names.failed)
    return Place(name, arguments, queue, alone=band == "suspect")


def safe(failed: Place) -> dict[str, Any]:
    """Arguments that keep a server policy from destroying accepted jobs."""
    # A full queue refuses new jobs and drops no job. A message that the server takes out goes to
    # the failed jobs, with ``at-most-once``. With ``at-least-once`` a queue can lose its leader for
    # good when nodes come and go, and then all of its jobs wait.
    return {
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": failed.name,
    }


def server_priority(rank: int) -> int:
    """The priority of a job in a classic queue: 0 to 20, higher first."""
    priority = max(-100.0, min(100.0, priority_of(rank)))
    step = -(-abs(priority) // 10)  # rounded away from 0: a priority above 0 stays above the middle
    middle = CLASSIC_PRIORITIES // 2
    return int(middle + step if priority > 0 else middle - step)


HOME = "home"  # the header that names the place of a job when it is due
_FIRST: Final = 0.5  # seconds: the least delay of level 1. Level 0 is for shorter delays.

LEVELS: Final = 24

LONGEST: Final = _FIRST * 2 ** (LEVELS - 1)  # seconds of the longest delay in one queue: 48 days


def level_of(seconds: float) -> int:
    if seconds < _FIRST:
        return 0
    return min(math.frexp(seconds / _FIRST)[1], LEVELS - 1)


def least(level: int) -> float:
    """The shortest wait of a job in the queue of a level, in seconds from its arrival there."""
    return float(_FIRST * 2 ** (level - 1)) if level else 0.0


def most(level: int) -> float:
    """The longest wait of a job in the queue of a level, in seconds."""
    return float(_FIRST * 2**level)
