"""Room: puts leave a reserve of disk and map, so that finishing and draining always work.

And the store must still lie where it was: what is written to deleted files is gone with us.

The ballast is a file that takes up disk until the disk is full all the same, and is then given up
so that what runs can be settled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time

import lmdb

from tidemill.brokers.lmdb.layout import Tables
from tidemill.errors import BrokerUnavailable, StoreFull

__all__ = ["Room"]

_BALLAST_MOST = 4 << 20
_BELIEVED = 0.05  # seconds a look at the disk holds good


class Room:
    """What one store may still take up."""

    def __init__(self, folder: str, env: lmdb.Environment, tables: Tables) -> None:
        self._folder = folder
        self._env = env
        self._tables = tables
        self._ballast = os.path.join(folder, "ballast")
        path = env.path()
        self._file = os.path.join(path, "data.mdb") if os.path.isdir(path) else path
        self._was = _place_of(self._file)
        self._checked = -1.0
        self._left = 0
        self._shortage = ""

    def reserve(self) -> int:
        """Bytes of disk that puts leave free."""
        total = shutil.disk_usage(self._folder).total
        return min(64 << 20, max(1 << 20, total // 10))

    def used(self) -> int:
        """Bytes of pages in use; the rest of the file is free for reuse."""
        with self._env.begin() as txn:
            stats = [txn.stat(table) for table in self._tables]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return pages * stats[0]["psize"]

    def check(self, size: int) -> None:
        """Refuse ``size`` bytes when the disk or the map is down to its reserve.

        Looks at most every 50 ms, unless so much was put since that it matters sooner.

        Raises:
            StoreFull: naming which.
            BrokerUnavailable: the store was deleted, or another was put in its place.
        """
        now = time.monotonic()
        self._left -= size
        if now - self._checked > _BELIEVED or self._left < 0:
            self.check_place()
            self._shortage, self._left = self._look()
            self._checked = now
            self._left -= size
        if self._shortage:
            raise StoreFull(self._shortage)

    def check_place(self) -> None:
        """Refuse to go on with files that no other process finds.

        Raises:
            BrokerUnavailable: the store was deleted, or another was put in its place.
        """
        if _place_of(self._file) != self._was:
            raise BrokerUnavailable(
                f"the store in {self._folder} was deleted or replaced while it was open; put it "
                "back and start this process again"
            )

    def look_again(self) -> None:
        """Believe the last look no longer."""
        self._checked = -1.0

    def _look(self) -> tuple[str, int]:
        """What is short, and the bytes that may be put before the next look."""
        free, reserve = shutil.disk_usage(self._folder).free, self.reserve()
        if free < reserve:
            return (
                f"the disk of {self._folder} has {free >> 20} MiB left, less than the reserve of "
                f"{reserve >> 20} MiB; make room, or finish or delete jobs"
            ), 0
        info = self._env.info()
        limit = info["map_size"] * 3 // 4
        used = info["last_pgno"] * self._env.stat()["psize"]
        if used > limit:
            used = self.used()
        if used > limit:
            return (
                f"the map of {self._folder} has {info['map_size'] >> 10} KiB, {used >> 10} KiB of "
                "them used; a quarter is kept to finish work. Use a larger map_size, or finish or "
                "delete jobs"
            ), 0
        return "", min(free - reserve, limit - used) // 8

    def keep_ballast(self) -> None:
        """Make the ballast when there is room for it."""
        size = min(self.reserve() // 2, _BALLAST_MOST)
        with contextlib.suppress(OSError):
            if os.path.exists(self._ballast) and os.path.getsize(self._ballast) >= size:
                return
            if shutil.disk_usage(self._folder).free <= 3 * self.reserve():
                return
            with open(self._ballast, "wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.write(b"\0" * size)

    def drop_ballast(self) -> bool:
        """Give the ballast up; True when there was some."""
        try:
            os.unlink(self._ballast)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return False
        return True


def _place_of(path: str) -> tuple[int, int]:
    """Which file a path leads to; (0, 0) for none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_dev, found.st_ino
