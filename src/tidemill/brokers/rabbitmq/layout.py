"""The layout of the server: names of queues and exchanges, and the arguments that declare them.

    PREFIX.tasks.normal.QUEUE      ready jobs of a queue; likewise tasks.high and tasks.low
    PREFIX.tasks.suspect.QUEUE     suspects: jobs that may have killed their workers
    PREFIX.messages.normal.QUEUE   raw messages, likewise
    PREFIX.tasks.classic.QUEUE     with queues=classic: one queue, with priorities
    PREFIX.failed                  jobs that failed for good, for a human
    PREFIX.queues                  a stream: the names of all queues that were ever used
    PREFIX.timer.LEVEL             delayed jobs (:mod:`.timer_queues`)
    PREFIX.timers                  the timer queues in use

For the jobs of a carried store, the prefix also has a digest of that store.

Here, a queue of the server is called a *place*: a queue of tidemill has several places.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from tidemill.core.envelope import Envelope
from tidemill.core.errors import InvalidOption
from tidemill.core.priority import priority_of

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
    """A queue of the server.

    Attributes:
        name: its name on the server.
        arguments: the arguments that declare the place.
        queue, kind: its queue of tidemill, and the kind of its jobs: ``tasks`` or ``messages``.
        alone: whether each of its jobs runs alone.
        listed: whether workers serve the place only after a notice (:mod:`.timer_queues`).
    """

    name: str
    arguments: dict[str, Any]
    queue: str = ""
    kind: str = ""
    alone: bool = False
    listed: bool = False

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
        bands = [self._place(queue, kind, band) for band in names]
        return [self.suspect(queue), *bands] if kind == "tasks" else bands

    def suspect(self, queue: str) -> Place:
        """The place of tasks that must run alone."""
        return self._place(queue, "tasks", "suspect")

    def home(self, job: Envelope) -> Place:
        """The place of a job when it is ready."""
        kind = "messages" if job.is_message else "tasks"
        if self.classic:
            return self._place(job.queue, kind, "classic")
        priority = priority_of(job.rank)
        band = "normal" if priority == 0 else "high" if priority > 0 else "low"
        return self._place(job.queue, kind, band)

    def _place(self, queue: str, kind: str, band: str) -> Place:
        return _place_of(self, queue, kind, band)

    def named(self, name: str) -> Place | None:
        """The place with this name on the server; None for a place without ready jobs."""
        parts = name.removeprefix(f"{self.prefix}.").split(".", 2)
        if len(parts) < 3 or parts[0] not in _KINDS or is_pattern(name):
            return None
        kind, band, queue = parts
        if band == "suspect":
            return self.suspect(queue)
        names = Names(self.prefix, band == "classic")
        return names._place(queue, kind, band) if band in (*_BANDS, "classic") else None

    @property
    def failed(self) -> Place:
        """The place of the failed jobs."""
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


@functools.lru_cache(maxsize=10_000)
def _place_of(names: Names, queue: str, kind: str, band: str) -> Place:
    if is_pattern(queue):
        raise InvalidOption(f"queue {queue!r} has a * or #, which RabbitMQ reads as a pattern")
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": NEVER}
    if names.classic:
        arguments = {"x-queue-type": "classic", "x-max-priority": CLASSIC_PRIORITIES}
    name = f"{names.prefix}.{kind}.{band}.{queue}"
    arguments |= safe(names.failed)
    return Place(name, arguments, queue, kind, alone=band == "suspect")


def safe(failed: Place) -> dict[str, Any]:
    """Arguments that keep a server policy from destroying accepted jobs.

    A full queue refuses new jobs and drops no job. A message that the server takes out goes to the
    failed jobs, with ``at-most-once``. With ``at-least-once`` a queue can lose its leader for good
    when nodes come and go, and then all of its jobs wait.
    """
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
