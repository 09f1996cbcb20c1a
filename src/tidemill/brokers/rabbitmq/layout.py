"""What lies where on the server: names of queues and exchanges, and what they are declared with.

    PREFIX.tasks.normal.QUEUE      jobs of a queue that are ready; high and low beside it
    PREFIX.tasks.suspect.QUEUE     such as may be what brought their workers down
    PREFIX.messages.normal.QUEUE   raw messages, likewise
    PREFIX.tasks.classic.QUEUE     with queues=classic: one queue, with priorities
    PREFIX.failed                  what failed for good, for a human
    PREFIX.queues                  a stream: the names of all queues that were ever used
    PREFIX.moved.MARK              how far a store has come that moves here (:mod:`.transfer_in`)
    PREFIX.delay.LEVEL.DIGIT       what is not due yet (:mod:`.due`)
    PREFIX.delay.LEVEL, PREFIX.due exchanges between those
    PREFIX.timer.LEVEL             what is not due yet, where workers keep time
                                   (:mod:`.timer_queues`); PREFIX.timers: which are in use

Of what a store has carried the prefix goes on with what stands for that store.

A queue of the server is called a *place* here, since a queue of ours has several.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from tidemill.core.errors import InvalidOption
from tidemill.core.job import Envelope, priority_of

__all__ = ["NEVER", "Names", "Place", "is_pattern", "safe", "server_priority"]

_KINDS, _BANDS = ("tasks", "messages"), ("high", "normal", "low")

CLASSIC_PRIORITIES = 20
"""The highest of a classic queue; 10 is our 0, and ten of ours make one of these."""

FAILED_KEPT, FAILED_MOST = 30 * 86400.0, 100_000
"""Seconds and messages the place of the failed keeps; the oldest go first."""

NEVER = 1_000_000_000
"""Deliveries after which the server drops a message. Only where there is such a limit what is given
back goes to the front, in the order in which it is; else it goes to the end."""

_STREAM_BYTES, _SEGMENT_BYTES = 4_000_000, 500_000


class Place(msgspec.Struct, frozen=True):
    """A queue of the server.

    Attributes:
        name: on the server.
        arguments: what it is declared with.
        older: what earlier releases declared it with; the server changes no queue that is there.
        queue, kind: whose it is; the kind is tasks or messages.
        due: it is bound to the exchange of what has come due.
        alone: each of its jobs is run alone.
        listed: workers serve it when they are told of it (:mod:`.timer_queues`).
    """

    name: str
    arguments: dict[str, Any]
    older: dict[str, Any] | None = None
    queue: str = ""
    kind: str = ""
    due: bool = False
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
        """Where tasks wait that are to run alone."""
        return self._place(queue, "tasks", "suspect")

    def home(self, job: Envelope) -> Place:
        """Where a job waits that is ready."""
        kind = "messages" if job.is_message else "tasks"
        if self.classic:
            return self._place(job.queue, kind, "classic")
        priority = priority_of(job.rank)
        band = "normal" if priority == 0 else "high" if priority > 0 else "low"
        return self._place(job.queue, kind, band)

    def _place(self, queue: str, kind: str, band: str) -> Place:
        return _place_of(self, queue, kind, band)

    def named(self, name: str) -> Place | None:
        """The place of this name on the server; None when no job is ready there."""
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
        """Where what failed is kept."""
        arguments = {
            "x-queue-type": "quorum",
            "x-message-ttl": int(FAILED_KEPT * 1000),
            "x-max-length": FAILED_MOST,
            # A look counts as a delivery, and there may be many before anybody acts.
            "x-delivery-limit": NEVER,
        }
        return Place(f"{self.prefix}.failed", arguments)

    @property
    def registry(self) -> Place:
        """The stream of names."""
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
    older: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": NEVER}
    if names.classic:
        older = {"x-queue-type": "classic", "x-max-priority": CLASSIC_PRIORITIES}
    name = f"{names.prefix}.{kind}.{band}.{queue}"
    arguments = older | safe(names.failed)
    return Place(name, arguments, older, queue, kind, due=True, alone=band == "suspect")


def safe(failed: Place) -> dict[str, Any]:
    """What keeps a policy of the server from destroying jobs that were accepted.

    A full queue refuses new jobs and drops none. What the server takes out of a queue goes to the
    failed jobs. It does so at most once: with ``at-least-once`` a queue can lose its leader for
    good when nodes come and go, and then all of its jobs wait.
    """
    return {
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": failed.name,
    }


def server_priority(rank: int) -> int:
    """The priority a job has in a classic queue: 0 to 20, higher first."""
    priority = max(-100.0, min(100.0, priority_of(rank)))
    step = -(-abs(priority) // 10)  # whatever is above 0 is above it there, too
    middle = CLASSIC_PRIORITIES // 2
    return int(middle + step if priority > 0 else middle - step)
