"""Counts of runs in a mapped file: they work whatever a task does to its process.

A note in a mapped file needs no descriptor, no memory and no disk. Each job of a rig has a row:
begins, ends, process, attempt, start, end.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_ROW = struct.Struct("=IIIIdd")
ROWS = 64


class Row(NamedTuple):
    """Counters of a job."""

    begins: int = 0
    ends: int = 0
    pid: int = 0
    attempt: int = 0
    begun: float = 0.0
    ended: float = 0.0


class Counters:
    """The mapped file: a flag that releases the long jobs, then the rows."""

    def __init__(self, path: Path) -> None:
        size = 8 + ROWS * _ROW.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.truncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def row(self, index: int) -> Row:
        """Return the counters of the job of that number."""
        return Row(*_ROW.unpack_from(self._map, 8 + index * _ROW.size))

    def _write(self, index: int, row: tuple[float, ...]) -> None:
        _ROW.pack_into(self._map, 8 + index * _ROW.size, *row)

    def begin(self, index: int, attempt: int) -> None:
        """A run begins."""
        begins, ends, *_, ended = self.row(index)
        self._write(index, (begins + 1, ends, os.getpid(), attempt, time.time(), ended))

    def end(self, index: int) -> None:
        """A run ends."""
        begins, ends, pid, attempt, begun, _ = self.row(index)
        self._write(index, (begins, ends + 1, pid, attempt, begun, time.time()))

    @property
    def released(self) -> bool:
        """True once long jobs may end."""
        return bool(self._map[0])

    def release(self) -> None:
        """Let long jobs end."""
        self._map[0] = 1

    def together(self, indexes: range) -> bool:
        """True when all jobs of these numbers have begun."""
        return all(self.row(index).begins for index in indexes)

    def until(
        self, check: Callable[[], bool], seconds: float, pause: Callable[[float], None]
    ) -> bool:
        """Wait until the check is true; False when the time is over."""
        over = time.time() + seconds
        while not check():
            if time.time() > over:
                return False
            pause(0.01)
        return True
