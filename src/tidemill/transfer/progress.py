"""The progress and the result of a move."""

from __future__ import annotations

import msgspec

__all__ = ["Moved"]


class Moved(msgspec.Struct):
    """The progress of a move, in jobs.

    Attributes:
        stayed: ids of jobs that stay, since the target has their id or key already.
        stayed_schedules: names of schedules that stay, likewise.
        left: jobs that a message broker cannot hold as a target, by kind.
        repeated: jobs of a message broker as the source that were there twice, or in the target
            already, since a move was killed.
        strange: messages that are not jobs; they stay in the message broker.
        remaining: jobs that arrived in the message broker during the move.
        consumers: the consumers that took jobs from it during the move.
        unanswered: parts of it that did not answer; the move is not done.
    """

    total: int = 0
    done: int = 0
    running: int = 0
    stayed: list[str] = []
    schedules: int = 0
    stayed_schedules: list[str] = []
    left: dict[str, int] = {}
    repeated: int = 0
    strange: list[str] = []
    remaining: int = 0
    consumers: int = 0
    unanswered: list[str] = []

    @property
    def gone(self) -> int:
        """The number of jobs that moved."""
        return self.done - len(self.stayed)
