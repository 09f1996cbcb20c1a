"""The disk reserve: puts leave room on disk and in the map, so that jobs can always finish.

Puts also check that the files were not deleted or replaced: their jobs would be lost.

The ballast is a file that occupies part of the disk. If the disk fills up in spite of the reserve,
the ballast gives its blocks to the data file, so that running jobs can be settled. Leases may use
half of the blocks. The last blocks are kept for commits that only make free pages usable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tidemill.brokers.lmdb.environment import Environment, no_inode
from tidemill.brokers.lmdb.layout import Tables
from tidemill.brokers.lmdb.write_transaction import begin_resized
from tidemill.core.errors import BrokerUnavailable, StoreFull, StoreGone
from tidemill.core.files import create_file

log = logging.getLogger("tidemill")

MAP_FOR_PUTS = 0.75
"""The part of the map that puts may fill; the rest is for settling running jobs."""

FOR_VERDICTS = 0.5
FOR_UPKEEP = 0.125
"""The fractions of the ballast that leases must leave, and that all other work must leave."""

TIGHT_FOR = 1.0
"""For these seconds after a commit that found no room, each commit first makes pages usable."""

_PAGES_OF_A_STEP, _PAGES_OF_A_JOB = 12, 2
"""The most pages that a step changes, and the most pages that each further job adds."""

_BALLAST_MOST = 4 << 20
_BALLAST_PART = 32 << 10
_BELIEVED = 0.05  # seconds that a look at the disk stays valid


class DiskReserve:
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
        self._refused_at = -TIGHT_FOR  # machine time at which a commit last found no room
        self._is_logged = False  # True when the log says that results are lost in this shortage

    def reserve(self) -> int:
        """Bytes of disk that puts leave free."""
        total = shutil.disk_usage(self._folder).total
        return min(64 << 20, max(1 << 20, total // 10))

    def used(self) -> int:
        """Bytes of pages in use; the rest of the file is free for reuse."""
        with begin_resized(self._env) as txn:
            stats = [txn.stat(table) for table in self._tables]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return pages * stats[0]["psize"]

    def _reusable(self) -> int:
        """Bytes of the file that deleted jobs have freed, and that new jobs can use."""
        with begin_resized(self._env) as txn, txn.cursor() as cursor:
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
        """Refuse ``size`` bytes when only the reserve of the disk or of the map is left.

        Looks at the disk every 50 ms at most, or sooner after a put of many bytes.

        Raises:
            StoreFull: the disk or the map is short of room.
            StoreGone: the store was deleted, or another was put in its place.
        """
        now = time.monotonic()
        self._left -= size
        if now - self._checked > _BELIEVED or self._left < 0:
            self.check_place()
            self._shortage, self._left = self._look()
            self._checked = now
            self._left -= size
            self._is_logged = self._is_logged and bool(self._shortage)
        if self._shortage:
            raise StoreFull(self._shortage)

    @property
    def is_tight(self) -> bool:
        """True for a moment after a commit that found no room."""
        return time.monotonic() - self._refused_at < TIGHT_FOR

    def note_refusal(self) -> None:
        """Remember that a commit found no room."""
        self._refused_at = time.monotonic()

    @property
    def is_short(self) -> bool:
        """True while puts are refused; looks at the disk at most every 50 ms."""
        now = time.monotonic()
        if now - self._checked > _BELIEVED:
            self._shortage, self._left = self._look()
            self._checked = now
        return bool(self._shortage)

    def jobs_in_a_step(self) -> int:
        """The number of jobs that a step may settle and lease, by the free pages of the file."""
        info, page = self._env.info(), self._env.stat()["psize"]
        end = (info["last_pgno"] + 1) * page
        disk = shutil.disk_usage(self._folder).free + max(0, os.path.getsize(self._file) - end)
        free = self._reusable() + max(0, min(disk, info["map_size"] - end))
        return max(1, (free // page // 3 - _PAGES_OF_A_STEP) // _PAGES_OF_A_JOB)

    def shortage(self) -> str:
        """The reason why puts are refused now; empty when puts are accepted."""
        return self._look()[0]

    def check_place(self) -> None:
        """Refuse to use files that other processes can no longer find.

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
        begin_resized(self._env).abort()  # else the size of the map may be out of date
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
        return "", min(free - reserve, limit - used) // 8

    def _ballast_size(self) -> int:
        return min(self.reserve() // 2, _BALLAST_MOST)

    def keep_ballast(self) -> None:
        """Make the ballast when there is room for it."""
        size = self._ballast_size()
        # If there is no room, or the file belongs to another user, go on without ballast.
        with contextlib.suppress(OSError, BrokerUnavailable):
            if os.path.exists(self._ballast) and os.path.getsize(self._ballast) >= size:
                return
            if shutil.disk_usage(self._folder).free <= 3 * self.reserve():
                return
            with open(create_file(self._ballast), "wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.write(b"\0" * size)

    def give_ballast(
        self, write: Callable[[Callable[[object], None]], None], kept: float = 0.0
    ) -> bool:
        """Give the ballast to the data file, except the fraction ``kept``; False without ballast.

        ``write`` runs a function in a write transaction, so that nobody writes the same blocks.
        The data file gets the blocks before another program can fill the disk.
        """
        given = False

        def give(_: object) -> None:
            nonlocal given
            # If the request is replayed, no ballast is left the second time.
            given = self._move_ballast(kept) or given

        if os.path.exists(self._ballast):
            write(give)
        return given

    def _move_ballast(self, kept: float) -> bool:
        """Free the ballast in parts, and allocate each part at once; False without a ballast.

        The holes of the data file come first. A hole is a page that a commit took and gave up
        before it was written. LMDB counts holes as free pages, but a full disk refuses a write to a
        hole.
        """
        if _place_of(self._file) != self._was or not os.path.exists(self._ballast):
            return False  # no ballast, or the ballast of another store
        end = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        least = 0 if no_inode(self._folder) else int(self._ballast_size() * kept)
        fd = create_file(self._ballast)
        try:
            size = left = os.fstat(fd).st_size
            for start, part in _parts([*self._lock.holes(end), (end, size)], size - least):
                # Another program may take the blocks of one part, but hardly of all parts.
                left -= part
                os.ftruncate(fd, left)
                self._lock.allocate(start, part)
        finally:
            os.close(fd)
        if not least:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._ballast)
        return left < size

    def free_pages(self, write: Callable[[Callable[[Any], None]], None]) -> bool:
        """Make pages usable that the latest commits have freed; False when no commit fits.

        A page that a commit frees becomes usable in the commit after the next one. While no commit
        fits, pages stay unusable. So this method makes two commits that change hardly any pages.
        """
        try:
            self._commit_twice(write)
        except StoreFull:
            if not self.give_ballast(write):
                return False
            self._commit_twice(write)
        return True

    def _commit_twice(self, write: Callable[[Callable[[Any], None]], None]) -> None:
        key = self._prefix + b"=format"
        for _ in range(2):
            write(lambda commit: commit.txn.put(key, commit.txn.get(key)))

    def log_lost_results(self) -> None:
        """Log once for each shortage that large results are lost."""
        if not self._is_logged:
            self._is_logged = True
            log.error("%s; until then large results are not kept", self._shortage)


def _parts(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    """The first ``size`` bytes of some ranges, as start and size of small parts."""
    for start, length in ranges:
        end = start + min(length, size)
        size -= end - start
        for place in range(start, end, _BALLAST_PART):
            yield place, min(_BALLAST_PART, end - place)


def _place_of(path: str) -> tuple[int, int]:
    """Device and inode of the file that a path leads to; (0, 0) for none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_dev, found.st_ino
