"""What a move tells of itself, while it goes on and at its end."""

from __future__ import annotations

import msgspec

__all__ = ["Moved"]


class Moved(msgspec.Struct):
    """How far a move is, in jobs.

    ``stayed`` lists ids that could not go: the target has their id, or their key, already; and
    ``stayed_schedules`` the names of schedules, likewise. ``left`` are those that a target which
    only carries jobs has no place for, by what they are.

    Of a source that only carries jobs: ``repeated`` were there twice, or in the target already,
    since somebody was killed; ``strange`` are messages that are no jobs, and stayed. It is not
    closed: so many jobs that came meanwhile were ``remaining`` at the end, and so many
    ``consumers`` took from it. ``unanswered`` are its places that did not answer, whatever lies
    there: the move is not done.
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
        """Jobs that went over."""
        return self.done - len(self.stayed)
