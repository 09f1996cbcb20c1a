"""Memory and processor time of the processes of a worker on this machine, from ``/proc``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import NamedTuple

_MOST = 2000
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """The memory of a worker's processes in bytes, and the processors that they used.

    ``cpu`` is the mean since the last reading; 1.0 is one busy processor. None at the first
    reading.
    """

    processes: int
    memory: int
    cpu: float | None


class Usages:
    """Reads the usage of processes, and remembers their processor time between readings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[int, tuple[float, float, float | None]] = {}

    def of(self, pid: int) -> Usage | None:
        """The usage of a process and of its children; None where it cannot be read."""
        memory, ticks, count = 0, 0, 0
        for one in [pid, *_children(pid)]:
            found = _read(one)
            if found is not None:
                memory, ticks, count = memory + found[0], ticks + found[1], count + 1
        if not count:
            return None
        return Usage(count, memory, self._rate(pid, ticks / _TICKS))

    def _rate(self, pid: int, used: float) -> float | None:
        now = time.monotonic()
        with self._lock:
            if len(self._last) > _MOST:
                self._last.clear()
            before = self._last.get(pid)
            if before is None:
                self._last[pid] = now, used, None
                return None
            if now - before[0] < 1:
                return before[2]
            rate = max(0.0, (used - before[1]) / (now - before[0]))
            self._last[pid] = now, used, rate
            return rate


def _children(pid: int) -> list[int]:
    """The child processes of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *_children(child)]
    return found


def _read(pid: int) -> tuple[int, int] | None:
    """The unshared memory of a process in bytes, and the clock ticks that the process used."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/statm") as file:
            sizes = file.read().split()
    except OSError:
        return None
    return (int(sizes[1]) - int(sizes[2])) * _PAGE, int(fields[11]) + int(fields[12])
