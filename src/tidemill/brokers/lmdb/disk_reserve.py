"""Room: puts leave a reserve of disk and map, so that finishing and draining always work.

The store must also still lie where it was: writes to deleted files are lost when we exit.

The ballast is a file that takes up disk until the disk is full all the same. Its blocks then go to
the data file, so that running jobs can be settled.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable

from tidemill.brokers.lmdb.environment import Environment
from tidemill.brokers.lmdb.layout import Tables
from tidemill.core.errors import BrokerUnavailable, StoreFull, StoreGone
from tidemill.core.files import create_file

__all__ = ["Room"]

log = logging.getLogger("tidemill")

_BALLAST_MOST = 4 << 20
_BALLAST_PART = 32 << 10
_BELIEVED = 0.05  # seconds that a look at the disk stays valid


class Room:
    """The room that one store may still take up."""

    def __init__(
        self,
        environment: Environment,
        tables: Tables,
        prefix: str,
    ) -> None:
        self._folder = environment.folder
        self._env = environment.env
        self._lock = environment.write_lock
        self._tables = tables
        self._prefix = prefix.encode()
        self._ballast = os.path.join(self._folder, "ballast")
        self._file = environment.data
        self._was = _place_of(self._file)
        self._checked = -1.0
        self._left = 0
        self._shortage = ""
        self._said = False  # the loss of results in this shortage was logged

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

    def _reusable(self) -> int:
        """Bytes of the file that hold nothing: finished jobs left them, and new jobs use them."""
        with self._env.begin() as txn:
            if not all(key.startswith(self._prefix) for key in txn.cursor().iternext(values=False)):
                return 0  # other data lies in the file, which we cannot count
        stat = self._env.stat()
        kept = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"] + 2
        pages = self._env.info()["last_pgno"] + 1 - kept
        return max(0, pages * stat["psize"] - self.used())

    def check(self, size: int) -> None:
        """Refuse ``size`` bytes when the disk or the map is down to its reserve.

        Looks at the disk at most every 50 ms, or sooner after a put of many bytes.

        Raises:
            StoreFull: with the disk or the map named.
            StoreGone: the store was deleted, or another was put in its place.
        """
        now = time.monotonic()
        self._left -= size
        if now - self._checked > _BELIEVED or self._left < 0:
            self.check_place()
            self._shortage, self._left = self._look()
            self._checked = now
            self._left -= size
            self._said = self._said and bool(self._shortage)
        if self._shortage:
            raise StoreFull(self._shortage)

    def shortage(self) -> str:
        """The reason why puts are refused now; empty when puts are accepted."""
        return self._look()[0]

    def check_place(self) -> None:
        """Refuse to go on with files that no other process finds.

        Raises:
            StoreGone: the store was deleted, or another was put in its place.
        """
        if _place_of(self._file) != self._was:
            raise StoreGone(
                f"the store in {self._folder} was deleted or replaced while it was open; put it "
                "back and start this process again"
            )

    def look_again(self) -> None:
        """Discard the result of the last look."""
        self._checked = -1.0

    def _look(self) -> tuple[str, int]:
        """The shortage, if any, and the bytes that may be put before the next look."""
        free, reserve = shutil.disk_usage(self._folder).free, self.reserve()
        if free < reserve:
            free += self._reusable()
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
        with contextlib.suppress(OSError, BrokerUnavailable):  # no room, or a file that is not ours
            if os.path.exists(self._ballast) and os.path.getsize(self._ballast) >= size:
                return
            if shutil.disk_usage(self._folder).free <= 3 * self.reserve():
                return
            with open(create_file(self._ballast), "wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.write(b"\0" * size)

    def give_ballast(self, write: Callable[[Callable[[object], None]], None]) -> bool:
        """Give the ballast to the data file; True when there was a ballast.

        ``write`` runs a function in a write transaction, so that nobody writes the same blocks.
        The data file gets the blocks before another program can fill the disk.
        """
        given = False

        def give(_: object) -> None:
            nonlocal given
            given = self._move_ballast() or given  # a replay finds no ballast

        if os.path.exists(self._ballast):
            write(give)
        return given

    def _move_ballast(self) -> bool:
        """Free the ballast in parts, and allocate each part at once; False without a ballast."""
        if _place_of(self._file) != self._was or not os.path.exists(self._ballast):
            return False  # no ballast, or the ballast of another store
        end = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        fd = create_file(self._ballast)
        try:
            left = os.fstat(fd).st_size
            while left > 0:  # another program may be faster, but hardly for all parts
                part = min(left, _BALLAST_PART)
                left -= part
                os.ftruncate(fd, left)
                self._lock.allocate(end, part)
                end += part
        finally:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._ballast)
        return True

    def say_lost(self) -> None:
        """Log once for each shortage that large results are lost."""
        if not self._said:
            self._said = True
            log.warning("%s; until then large results are not kept", self._shortage)


def _place_of(path: str) -> tuple[int, int]:
    """Device and inode of the file that a path leads to; (0, 0) for none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_dev, found.st_ino
