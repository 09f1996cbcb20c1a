"""What a commit is handed by others, to call or to tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from tidemill.brokers.lmdb.wake import Terms

if TYPE_CHECKING:
    from tidemill.brokers.lmdb.moves import Moves

__all__ = ["Commit", "HandOver", "Told"]

T = TypeVar("T")


class Told(Protocol):
    """An owner as far as it is told of its leases."""

    told: int  # the highest token it may know


class HandOver(Protocol):
    """Leases to an owner what it would take if it were awake; how many jobs those were."""

    def __call__(self, moves: Moves, lines: list[int], owner: int, terms: Terms, /) -> int: ...


class Commit(Protocol):
    """What has a function applied to the moves of one commit, and returns its result."""

    def __call__(self, apply: Callable[[Moves], T], /, *, patience: float | None = None) -> T: ...
