"""The progress and the result of a move."""

from __future__ import annotations

import msgspec


class Moved(msgspec.Struct):
    """The progress of a move, in jobs.

    Attributes:
        stayed: ids of jobs that stay, because the target has their id or key already.
        stayed_schedules: names of schedules that stay, because the target has their name already.
        left: the numbers of jobs, by kind, that stay because RabbitMQ cannot hold them.
    """

    total: int = 0
    done: int = 0
    running: int = 0
    stayed: list[str] = []
    schedules: int = 0
    stayed_schedules: list[str] = []
    left: dict[str, int] = {}

    @property
    def gone(self) -> int:
        return self.done - len(self.stayed)
