"""Which places have answered, and the trials of those that have not yet.

The server makes a channel wait for half a minute that sends to a queue for the first time and gets
no answer, with all that comes behind. So the first message to a place goes over a channel of its
own; when it is confirmed, what follows goes with everything else.
"""

from __future__ import annotations

from collections import deque

import pika

from tidemill.brokers.rabbitmq.lanes import Lane
from tidemill.brokers.rabbitmq.wire import Hearer, Wire

__all__ = ["Trials"]

_MOST = 64
"""Places that are tried at a time."""


class Trials:
    """Of one connection."""

    def __init__(self) -> None:
        self.wires: dict[str, Wire] = {}  # by place
        self.proven: set[str] = set()
        self._waiting: dict[str, list[Lane]] = {}  # by place: for what comes of its trial
        self._crowd: deque[Lane] = deque()  # until fewer are tried

    def enter(self, lane: Lane, connection: pika.SelectConnection, hearer: Hearer) -> None:
        """Have the place of a lane tried, which waits for that."""
        lane.trying = True
        if lane.target in self.wires:
            self._waiting[lane.target].append(lane)
        elif len(self.wires) < _MOST:
            self._waiting[lane.target] = [lane]
            self.wires[lane.target] = Wire(connection, hearer, lane.target)
        else:
            self._crowd.append(lane)

    def first(self, wire: Wire) -> Lane | None:
        """A lane with a message to try a place with."""
        return next((lane for lane in self._waiting[wire.trial] if lane.todo), None)

    def end(self, wire: Wire) -> list[Lane]:
        """The lanes that go on: those of that place, and one that waited for room."""
        wire.close()
        self.wires.pop(wire.trial, None)
        lanes = self._waiting.pop(wire.trial, [])
        if self._crowd:
            lanes.append(self._crowd.popleft())
        for lane in lanes:
            lane.trying = False
        return lanes

    def forget(self) -> None:
        """The connection is gone."""
        for kept in (self.wires, self.proven, self._waiting, self._crowd):
            kept.clear()
