"""Priorities of -100 to 100, higher first, and the ranks that stores keep, lower first."""

from __future__ import annotations

__all__ = ["MIDDLE_RANK", "priority_of", "rank_of"]

# Priorities are 0 to 4,294,967,295 in the store, lower first, as beanstalkd has them; its usual
# 1024 is our 0, so that jobs of both kinds can share a queue.
MIDDLE_RANK = 1024
_STEP = 10


def rank_of(priority: float) -> int:
    """The stored rank (unsigned 32-bit, lower first) of a priority of -100 to 100."""
    return round(MIDDLE_RANK - priority * _STEP)


def priority_of(rank: int) -> float:
    """The priority of a rank; an int if it is whole."""
    value = (MIDDLE_RANK - rank) / _STEP
    return int(value) if value == int(value) else value
