"""Checks of the arguments of broker calls. A client of another release may lack these checks."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.config import LATEST, MAX_NAME, MAX_SECONDS, check_name, check_size
from tidemill.core.envelope import Envelope
from tidemill.core.errors import InvalidOption
from tidemill.core.owner import Owner

MAX_QUEUES = 10_000
"""Queues that an owner may list."""

_BOUNDS = {
    "rank": 2**32 - 1,
    "delay": MAX_SECONDS,
    "timeout": MAX_SECONDS,
    **dict.fromkeys(("at", "created", "expires"), LATEST),
}
"""The highest value of each number in a job. Clients check these before they send a job."""


def check_jobs(jobs: Sequence[Envelope]) -> None:
    """Refuse names and times that a store cannot keep, and bodies that are too large."""
    for job in jobs:
        if not (job.id and job.queue):
            raise InvalidOption("a job must have an id and a queue")
        for name in (job.id, job.queue, job.task, job.key):
            if len(name) * 4 > MAX_NAME and len(name.encode()) > MAX_NAME:
                raise InvalidOption(f"the name {name[:40]!r}… has more than {MAX_NAME} bytes")
        for what, bound in _BOUNDS.items():
            value = getattr(job, what)
            if not 0 <= value <= bound:  # refuses NaN, too
                raise InvalidOption(f"the {what} of a job must be 0 to {bound:.0f}, not {value}")
        check_size(job.body, job.headers, job.tags)


def check_owner(owner: Owner) -> None:
    """Refuse invalid names of an owner, its kind, its host and its queues."""
    check_name("the id of an owner", owner.id)
    for what, name in [("kind", owner.kind), ("name", owner.name), ("host", owner.host)]:
        if name:
            check_name(f"the {what} of an owner", name)
    if len(owner.queues) > MAX_QUEUES:
        raise InvalidOption(f"an owner has {MAX_QUEUES:,} queues at most, not {len(owner.queues)}")
    for name in owner.queues:
        check_name("a queue of an owner", name)


def check_seconds(what: str, seconds: float) -> None:
    """Refuse durations that the clock of a store cannot hold."""
    if not 0 <= seconds <= MAX_SECONDS:  # refuses NaN, too
        raise InvalidOption(f"{what} must be 0 to {MAX_SECONDS:.0f} seconds, not {seconds}")


def check_target(rank: int | None, queue: str | None) -> None:
    """Refuse a rank or a queue that no job can have."""
    if rank is not None and not 0 <= rank <= _BOUNDS["rank"]:
        raise InvalidOption(f"the rank of a job must be 0 to {_BOUNDS['rank']:.0f}, not {rank}")
    if queue is not None:
        check_name("queue", queue)
