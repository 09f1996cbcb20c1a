"""What the benchmark task does: note that it ran, and when, as cheaply as possible.

Every process that runs tasks maps one sparse file of 16-byte records (stamp, start) into memory and
fills it from the front: no system call, no lock, nothing that gives up the interpreter lock, and
what was written stays readable when the process is killed. The same for every system measured.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
import time
from pathlib import Path

RECORD = struct.Struct("<dd")
"""The stamp the job carried (0 for none), and the wall time at which it ran."""

_opening = threading.Lock()
_records: mmap.mmap | None = None
_slots = itertools.count()


def mark(stamp: float = 0.0) -> None:
    """Record one execution, now; ``stamp`` is when the job was sent or due, in epoch seconds."""
    now = time.time()
    records = _records or _open()
    RECORD.pack_into(records, next(_slots) * RECORD.size, stamp, now)


def _open() -> mmap.mmap:
    global _records
    with _opening:
        if _records is None:
            path = Path(os.environ["BENCH_TMP"]) / f"{os.getpid()}.marks"
            with path.open("w+b") as file:
                file.truncate(int(os.environ["BENCH_CAPACITY"]) * RECORD.size)
                _records = mmap.mmap(file.fileno(), 0)
        return _records


def _forget() -> None:
    """A forked child writes a file of its own."""
    global _opening, _records, _slots
    _opening, _records, _slots = threading.Lock(), None, itertools.count()


os.register_at_fork(after_in_child=_forget)


class Marks:
    """Reads the records of all processes that ran tasks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def count(self) -> int:
        """Executions so far, by a binary search for the first empty record of each file."""
        return sum(_filled(path) for path in self.folder.glob("*.marks"))

    def read(self) -> list[tuple[float, float]]:
        """All (stamp, start), in order of start."""
        found = []
        for path in self.folder.glob("*.marks"):
            with path.open("rb") as file:
                # A few records more: with threads the last ones may not be filled in order.
                data = file.read((_filled(path) + 64) * RECORD.size)
            whole = len(data) - len(data) % RECORD.size
            found += [record for record in RECORD.iter_unpack(data[:whole]) if record[1]]
        return sorted(found, key=lambda record: record[1])


def _filled(path: Path) -> int:
    with path.open("rb") as file:
        low, high = 0, os.fstat(file.fileno()).st_size // RECORD.size
        while low < high:
            middle = (low + high) // 2
            if RECORD.unpack(os.pread(file.fileno(), RECORD.size, middle * RECORD.size))[1]:
                low = middle + 1
            else:
                high = middle
    return low
