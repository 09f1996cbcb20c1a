"""Packing of schedules; ``lua/schedules.lua`` and ``schedules_change.lua`` have the other side."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from tidemill.brokers.contract.schedules import Change, Changed, Schedule
from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.record import pack_put

_RECORD = struct.Struct(">Qd")  # version, due; then the body
_CHANGE = struct.Struct(">QdBId")  # version expected, due, gone, number of jobs, due instead


class Book:
    def __init__(self, lines: ServerConnections) -> None:
        self._lines = lines

    def get(self, names: Sequence[str]) -> list[Schedule | None]:
        """The schedules with these names, read at one moment."""
        found = self._lines.call("inspect", b"schedules", *(name.encode() for name in names))
        return [
            _opened(name, data) if data else None for name, data in zip(names, found, strict=True)
        ]

    def page(self, after: str = "", limit: int = 100) -> list[Schedule]:
        found = self._lines.call("inspect", b"schedules_after", after.encode(), b"%d" % limit)
        return read_schedules(found)


def read_schedules(shown: Sequence[bytes]) -> list[Schedule]:
    """Read schedules from an answer with names and records in turn."""
    return [_opened(shown[i].decode(), shown[i + 1]) for i in range(0, len(shown), 2)]


def _opened(name: str, data: bytes) -> Schedule:
    version, due = _RECORD.unpack_from(data)
    return Schedule(name, version, due, data[_RECORD.size :])


def pack_changes(changes: Sequence[Change]) -> tuple[str, list[bytes]]:
    """Return (verb, its arguments). A full server still makes changes that need no room."""
    args = [b"%d" % len(changes)]
    for c in changes:
        due, body = c.instead
        packed = _CHANGE.pack(c.expect, c.due, c.gone, len(c.jobs), due)
        args += (c.name.encode(), packed, c.body, body, *pack_put(c.jobs))
    grows = any(change.jobs or not change.expect for change in changes)
    return "schedules_change" if grows else "schedules_drop", args


def pack_adopted(schedules: Sequence[Schedule]) -> list[bytes]:
    """Pack schedules of a departed store: their number, then name and record of each."""
    args = [b"%d" % len(schedules)]
    for s in schedules:
        args += (s.name.encode(), _RECORD.pack(0, s.due) + s.body)
    return args


def read_changed(answer: Sequence[Any]) -> list[Changed]:
    return [
        Changed(True, int(did[0]), tuple(why.decode() for why in did[1:])) if did else Changed()
        for did in answer
    ]
