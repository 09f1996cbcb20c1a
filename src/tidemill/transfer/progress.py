"""The progress and the result of a move."""

from __future__ import annotations

import msgspec


class Moved(msgspec.Struct):
    """The progress of a move, in jobs.

    Attributes:
        stayed: ids of jobs that stay, because the target has their id or key already.
        stayed_schedules: names of schedules that stay, because the target has their name already.
        left: the numbers of jobs, by kind, that stay because a message broker as the target cannot
            hold them.
        repeated: the number of jobs that a message broker as the source had twice, or that the
            target had already because an earlier move was killed.
        strange: names of messages that are not jobs; they stay in the message broker.
        remaining: the number of jobs that arrived in the message broker during the move.
        consumers: the number of consumers that took jobs from the message broker meanwhile.
        unanswered: parts of the message broker that did not answer; the move is incomplete.
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
