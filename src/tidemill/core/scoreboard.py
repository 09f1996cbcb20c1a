"""The scoreboard: a mapped file of the jobs that a worker runs at this moment.

Worker processes write the file. The supervisor reads it when a worker process dies. Another worker
reads it when all processes of a worker died at once. A job on the scoreboard was running and used
an attempt. A leased job that is not on the scoreboard was only prefetched (law 6 of
``docs/laws.md``).

The file begins with the id of its owner, so no reader takes it for another owner's file. Then come
rows of (token, thread, started, deadline). Each process has a *share* of the rows: a header, and
one row for each job that runs. A job that has ended keeps its row, because its verdict may not be
stored yet. A process uses its rows in turn and does not clear the row of a job that ended. A share
has more rows than the process can hold leases. So a row is used again only when its job has long
been settled. The token of a settled job matches no lease, because each lease has a fresh token.

The header holds the id of the process, the last time its timekeeper ran, and the number of its jobs
that wait for other jobs.

At the start of a job the token is written last. So after a kill during the write, no row shows a
job with the times of another job.

The owner of a scoreboard holds a ``flock`` on the file as long as the owner lives. Another process
may take this lock and remove a scoreboard whose owner is not listed. A starting owner may wait for
the lock of a file that is removed. The owner sees that the file is gone, and makes another file.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tidemill.core.files import Folder, create_file
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable

_OWNER = struct.Struct("=32s")
_TOKEN = struct.Struct("=Q")
_REST = struct.Struct("=Qdd")
_SLOT = struct.Struct("=QQdd")
_TIME = struct.Struct("=d")
_HEADER = (1 << 64) - 1  # the mark of a header, in place of a token


def allocate(fd: int, size: int) -> None:
    """Grow a file to ``size`` bytes with allocated blocks, before it is mapped."""
    # Without this, writing to a mapped hole on a full disk would end the process with SIGBUS.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:  # macOS
        os.pwrite(fd, b"\0" * size, 0)


class Running(NamedTuple):
    """A row of a scoreboard.

    ``started`` is wall time. ``deadline`` is machine time, or 0 without a deadline. ``thread`` is
    the kernel's id of the thread that runs the job.
    """

    slot: int
    token: int
    thread: int
    started: float
    deadline: float


class Scoreboard:
    """A scoreboard of ``slots`` rows, made or opened at ``path``."""

    def __init__(self, path: str, slots: int) -> None:
        self.path = path
        self.slots = slots
        self._open()

    def _open(self) -> None:
        size = _at(max(1, self.slots))
        self._fd = create_file(self.path)
        new = not os.fstat(self._fd).st_size
        try:
            if os.fstat(self._fd).st_size < size:
                allocate(self._fd, size)
            self._map = mmap.mmap(self._fd, max(size, os.fstat(self._fd).st_size))
        except BaseException:
            os.close(self._fd)
            if new:
                os.unlink(self.path)
            raise

    def claim(self, owner_id: str) -> None:
        """Write the owner's id, and keep the file locked as long as this process lives."""
        claim = _claim(owner_id)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        while not _is_at(self.path, self._fd):  # the file was deleted before it was locked
            self.close()
            self._open()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        _OWNER.pack_into(self._map, 0, claim)

    def grow(self, slots: int) -> None:
        """Grow the file to at least ``slots`` rows, for processes that start from now on."""
        size = _at(slots)
        if os.fstat(self._fd).st_size < size:
            allocate(self._fd, size)
        self.slots = max(slots, self.slots)
        self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)

    def start(self, slot: int, token: int, thread: int, started: float, deadline: float) -> None:
        at = _at(slot)
        _REST.pack_into(self._map, at + 8, thread, started, deadline)
        _TOKEN.pack_into(self._map, at, token)

    def running(self, first: int, count: int, tokens: Iterable[int]) -> list[Running]:
        """The rows of these tokens, among the ``count`` rows that begin with row ``first``."""
        data = self._map[_at(first) : _at(first + count)]
        shown = array.array("Q", data)[:: _SLOT.size // 8].tolist()
        places = sorted(shown.index(token) for token in {*shown}.intersection(tokens))
        return [Running(first + n, *_SLOT.unpack_from(data, n * _SLOT.size)) for n in places]

    def clear(self, first: int, count: int) -> None:
        """Empty a range of rows, after their process has ended and its verdicts are stored."""
        self._map[_at(first) : _at(first + count)] = bytes(count * _SLOT.size)

    def sign(self, slot: int, pid: int, beat: float) -> None:
        _SLOT.pack_into(self._map, _at(slot), _HEADER, pid, beat, 0.0)

    def beat(self, slot: int, now: float) -> None:
        """Record that the timekeeper of a process ran, so no task holds the interpreter lock."""
        _TIME.pack_into(self._map, _at(slot) + 16, now)

    def beat_of(self, slot: int) -> float:
        """The time at which the timekeeper of a process last ran."""
        return float(_TIME.unpack_from(self._map, _at(slot) + 16)[0])

    def set_waiting(self, slot: int, pid: int, waiting: int) -> None:
        _TOKEN.pack_into(self._map, _at(slot) + 8, pid | waiting << 32)

    def waiting(self, share: int) -> int:
        """The number of jobs that wait for other jobs, in all shares of ``share`` rows."""
        if os.fstat(self._fd).st_size > len(self._map):
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        starts = range(_at(0), len(self._map), share * _SLOT.size)
        heads = (self._map[at : at + 16] for at in starts)
        words = [struct.unpack("=QQ", head) for head in heads if len(head) == 16]
        return sum(word >> 32 for mark, word in words if mark == _HEADER)

    def close(self) -> None:
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        self.close()
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass


def _rows(
    path: str, owner_id: str, folder: Folder | None = None
) -> list[tuple[int, int, float, float]] | None:
    """All rows of an owner's scoreboard; None when the file is gone."""
    # With ``folder`` only the name in ``path`` counts, because the owner may know the folder by
    # another path. Of a truncated file, the rows that are left are read.
    try:
        fd = _found(path, folder)
        with open(fd, "rb") as file:
            data = file.read()
    except (OSError, BrokerUnavailable):
        return None
    if data[: _OWNER.size] != owner_id.encode().ljust(_OWNER.size, b"\0"):
        return None
    slots = data[_OWNER.size :]
    usable = len(slots) - len(slots) % _SLOT.size
    return [row for row in _SLOT.iter_unpack(slots[:usable]) if row[0]]


def _at(slot: int) -> int:
    return _OWNER.size + slot * _SLOT.size


def _claim(owner_id: str) -> bytes:
    claim = owner_id.encode()
    if not 0 < len(claim) <= _OWNER.size:
        raise ValueError(f"owner id {owner_id!r} must have 1 to {_OWNER.size} bytes")
    return claim.ljust(_OWNER.size, b"\0")


def read_scoreboard(
    path: str, owner_id: str, folder: Folder | None = None
) -> dict[int, float] | None:
    """The tokens of a dead owner's running jobs, with their starts; None without a scoreboard."""
    # Tokens of settled jobs may be among them.
    runs = read_runs(path, owner_id, folder)
    return None if runs is None else {token: started for token, (_, started) in runs.items()}


def runs_by_name(owners: Iterable[Owner]) -> dict[str, dict[int, tuple[int, float]] | None]:
    """The runs of all owners of each name, as of ``read_runs``."""
    # Several owners may have one name. None for a name if one of its owners has no scoreboard here.
    found: dict[str, dict[int, tuple[int, float]] | None] = {}
    for owner in owners:
        runs = read_runs(owner.board, owner.id) if owner.board else None
        others = found.get(owner.name, {})
        found[owner.name] = None if runs is None or others is None else {**others, **runs}
    return found


def read_runs(
    path: str, owner_id: str, folder: Folder | None = None
) -> dict[int, tuple[int, float]] | None:
    """(process id, start) of each run of an owner, by token; None without a scoreboard."""
    # Tokens of settled jobs may be among them.
    rows = _rows(path, owner_id, folder)
    if rows is None:
        return None
    runs, pid = dict[int, tuple[int, float]](), 0
    for token, word, started, _ in rows:
        if token == _HEADER:
            pid = word & 0xFFFFFFFF
        else:
            runs[token] = pid, started
    return runs


def _found(path: str, folder: Folder | None) -> int:
    above, name = os.path.split(path)
    if folder is not None:
        try:
            return folder.open(name, os.O_RDONLY)
        except FileNotFoundError:
            pass  # the scoreboard of a worker whose broker has no folder is a temporary file
    with contextlib.closing(Folder(above or ".")) as there:
        return there.open(name, os.O_RDONLY)


def _is_at(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def sweep_scoreboards(folder: Folder, listed: Collection[str]) -> None:
    """Delete scoreboards of dead owners: files that are neither ``listed`` nor locked."""
    # Call this while the list of owners cannot change. Other files and other users' files stay.
    for name in folder.names():
        if name in listed:
            continue
        try:
            fd = folder.open(name, os.O_RDWR)
        except (OSError, BrokerUnavailable):
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = folder.stat(name)
            if found is not None and os.path.samestat(found, os.fstat(fd)):
                folder.remove(name)
        except OSError:
            pass  # a living owner holds the lock
        finally:
            os.close(fd)


def remove_scoreboard(path: str, owner_id: str, folder: Folder | None = None) -> None:
    """Delete the scoreboard of a gone owner, unless the file belongs to another owner."""
    if read_scoreboard(path, owner_id, folder) is None:
        return
    try:
        if folder is None or not folder.remove(os.path.basename(path)):
            os.unlink(path)
    except OSError:
        pass
