"""Priorities of -100 to 100, higher first, and the ranks that stores keep, lower first."""

from __future__ import annotations

# Ranks are 0 to 4,294,967,295, lower first, like the priorities of beanstalkd. Our priority 0 is
# rank 1024, the usual priority in beanstalkd. So tasks and beanstalk jobs can share a queue.
MIDDLE_RANK = 1024
_STEP = 10


def rank_of(priority: float) -> int:
    """The stored rank (unsigned 32-bit, lower first) of a priority of -100 to 100."""
    return round(MIDDLE_RANK - priority * _STEP)


def priority_of(rank: int) -> float:
    """The priority of a rank; an int if it is whole."""
    value = (MIDDLE_RANK - rank) / _STEP
    return int(value) if value == int(value) else value
