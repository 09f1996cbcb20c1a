"""The disk reserve: puts leave room on disk and in the map, so that jobs can always finish.

Each put also checks that the files were not deleted or replaced: its jobs would be lost. *Spare
blocks* behind the last page of the data file keep room that no other program can take, for work
that goes on while puts are refused (``docs/design/store-files.md``).

Two races remain. Between two looks at the disk, the puts of each process may use a quarter of the
spare blocks. A page that a commit frees is usable two commits later. So a small step may still find
pages when a large step finds too few, and owners hand in refused verdicts in smaller steps.
"""

from __future__ import annotations

import logging
import os
import shutil
import time

from tidemill.brokers.lmdb.engine.environment import Environment, translated
from tidemill.brokers.lmdb.engine.transactions import Reading
from tidemill.brokers.lmdb.layout import Tables
from tidemill.errors import StoreFull, StoreGone

log = logging.getLogger("tidemill")

MAP_FOR_PUTS = 0.75  # the part of the map that puts may fill; the rest is for settling running jobs

_SPARE_MOST = 4 << 20
_BELIEVED, _DOUBTED = 0.25, 0.05  # seconds that a look stays valid: with room, and with a shortage


class DiskReserve:
    """The room that one store may still take up."""

    def __init__(self, environment: Environment, tables: Tables, prefix: str) -> None:
        self._folder = environment.folder
        self._env = environment.env
        self._lock = environment.write_lock
        self._tables = tables
        self._prefix = prefix.encode()
        self._file = environment.data
        self._was = _place_of(self._file)
        self._checked = -1.0
        self._left = 0
        self._shortage = ""
        self._kept = 0  # the bytes of the data file that have disk blocks, as far as is known
        self._is_logged = False  # True when the log says that results are lost in this shortage

    def reserve(self) -> int:
        """Bytes of disk that puts leave free."""
        total = shutil.disk_usage(self._folder).total
        return min(64 << 20, max(1 << 20, total // 10))

    def _reading(self) -> Reading:
        return Reading(self._env, lambda error: translated(error, self._folder))

    def used(self) -> int:
        """Bytes of pages in use; the rest of the file is free for reuse."""
        with self._reading() as txn:
            stats = [txn.stat(table) for table in self._tables]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return pages * stats[0]["psize"]

    def _reusable(self) -> int:
        """Bytes of the file that deleted jobs have freed, and that new jobs can use."""
        with self._reading() as txn, txn.cursor() as cursor:
            ends = [cursor.key() for move in (cursor.first, cursor.last) if move()]
            if not all(key.startswith(self._prefix) for key in ends):
                return 0  # unknown: the file also has data of the caller
        pages = self._env.info()["last_pgno"] + 1 - 2
        return max(0, pages * self._env.stat()["psize"] - self.used() - self._used_by_main())

    def _used_by_main(self) -> int:
        """Bytes of pages of the main database, which has queues, history and names of tables."""
        stat = self._env.stat()
        pages: int = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return pages * int(stat["psize"])

    def check(self, size: int) -> None:
        """Refuse ``size`` bytes when only the reserve of the disk or of the map is left."""
        # Looks at the disk four times a second at most, or sooner after puts of many bytes. With a
        # shortage, each 50 ms at most.
        self.check_place()
        now = time.monotonic()
        self._left -= size
        if now - self._checked > (_DOUBTED if self._shortage else _BELIEVED) or self._left < 0:
            self._shortage, self._left = self._look()
            self._checked = now
            self._left -= size
            self._is_logged = self._is_logged and bool(self._shortage)
            if not self._shortage:
                self._keep_spare()
        if self._shortage:
            raise StoreFull(self._shortage)

    def shortage(self) -> str:
        """The reason why puts are refused now; empty when puts are accepted."""
        return self._look()[0]

    def check_place(self) -> None:
        """Refuse to use files that other processes can no longer find."""
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
        with self._reading():  # else the size of the map may be out of date
            info = self._env.info()
        limit = int(info["map_size"] * MAP_FOR_PUTS)
        used = info["last_pgno"] * self._env.stat()["psize"]
        if used > limit:
            used = self.used() + self._used_by_main()
        if used > limit:
            return (
                f"the map of {self._folder} has {info['map_size'] >> 10} KiB, {used >> 10} KiB of "
                "them used; a quarter is kept to finish work. Use a larger map_size, or finish or "
                "delete jobs"
            ), 0
        return "", min(self._spare(), (free - reserve) // 2, (limit - used) // 2) // 4

    def _spare(self) -> int:
        """Bytes of spare blocks behind the last page of the data file."""
        return min(self.reserve(), _SPARE_MOST)

    def renew(self) -> None:
        """Fill the holes of the data file, and renew its spare blocks, if the disk has room."""
        # The caller has a write transaction: some systems write to the blocks to allocate them.
        self._kept = 0
        if not self.shortage():
            self._keep_spare()

    def _keep_spare(self) -> None:
        """Allocate spare blocks, unless three quarters of them are there."""
        info, page, spare = self._env.info(), self._env.stat()["psize"], self._spare()
        end = (info["last_pgno"] + 1) * page
        # A file that lacks pages is not made longer: the doctor must still see that.
        if end + spare * 3 // 4 <= self._kept or os.path.getsize(self._file) < end:
            return
        most = min(end + spare, info["map_size"])
        if self._lock.allocate(self._kept, most - self._kept):
            self._kept = max(self._kept, most)

    def log_lost_results(self) -> None:
        """Log once for each shortage that large results are lost."""
        if not self._is_logged:
            self._is_logged = True
            log.error("%s; until then large results are not kept", self._shortage)


def _place_of(path: str) -> tuple[int, int]:
    """Device and inode of the file that a path leads to; (0, 0) for none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_dev, found.st_ino
