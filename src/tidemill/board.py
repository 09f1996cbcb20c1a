"""The scoreboard: a mapped file that says what a worker runs at this moment.

Worker processes write it and any survivor reads it: the supervisor, or, when everything died at
once, the next worker to look. A job on the board was running and used an attempt; a job handed out
but not on the board was only prefetched (law 6).

The file begins with the id of its owner, so that nobody takes another owner's board for it. Then
come rows of (token, thread, started, deadline). Each process has a *share* of them: a header, and
one row for each job that runs or has ended and may not be stored yet. A process takes its rows in
turn and does not clear the row of a job that ended: a share has more rows than the process can hold
leases, so the row is written anew only when that job has long been settled. A token of a settled
job means nothing to anybody, since each lease has a fresh one.

The header says which process has the share, when its clerk last ran, how many of its jobs wait for
other jobs, and since when it has outlived its SIGKILL.

Starting a job writes the token last, so that a kill in between never shows a job with the times of
another one.

The owner of a board holds a ``flock`` on it as long as the owner lives. A process that finds a
board unlocked, and its owner on no list, may remove it, and does so while holding the lock itself:
a claim that waited for that lock sees that its file is gone, and makes another.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Collection, Container
from typing import NamedTuple

from tidemill.errors import BrokerUnavailable
from tidemill.files import Folder, create_file

__all__ = [
    "Board",
    "Running",
    "allocate",
    "read_board",
    "read_unkillable",
    "remove_board",
    "sweep_boards",
]

_OWNER = struct.Struct("=32s")
_TOKEN = struct.Struct("=Q")
_REST = struct.Struct("=Qdd")
_SLOT = struct.Struct("=QQdd")
_TIME = struct.Struct("=d")
_HEADER = (1 << 64) - 1
"""Stands where a row has its token."""


def allocate(fd: int, size: int) -> None:
    """Make a file that is to be mapped ``size`` bytes long, with blocks of its own.

    Writing to a mapped hole when the disk is full ends the process with SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:  # macOS
        os.pwrite(fd, b"\0" * size, 0)


class Running(NamedTuple):
    """A row of a board. ``started`` is wall time, ``deadline`` machine time, 0 for none.

    ``thread`` is the kernel's number of the thread that runs the job.
    """

    slot: int
    token: int
    thread: int
    started: float
    deadline: float


class Board:
    """A board of ``slots`` slots, made or opened at ``path``."""

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
        """Say whose board it is, and that it is needed as long as this process lives."""
        claim = _claim(owner_id)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        while not _is_at(self.path, self._fd):  # it was swept before it was locked
            self.close()
            self._open()
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        _OWNER.pack_into(self._map, 0, claim)

    def grow(self, slots: int) -> None:
        """Have at least so many rows, for processes that start from now on."""
        size = _at(slots)
        if os.fstat(self._fd).st_size < size:
            allocate(self._fd, size)
        self.slots = max(slots, self.slots)
        self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)

    # -- rows of jobs ---------------------------------------------------------------------------

    def start(self, slot: int, token: int, thread: int, started: float, deadline: float) -> None:
        """Say that the slot runs the lease ``token`` from now on."""
        at = _at(slot)
        _REST.pack_into(self._map, at + 8, thread, started, deadline)
        _TOKEN.pack_into(self._map, at, token)

    def end(self, slot: int) -> None:
        """Say that the slot is idle."""
        _TOKEN.pack_into(self._map, _at(slot), 0)

    def running(self, first: int, count: int, tokens: Container[int]) -> list[Running]:
        """The rows of these tokens among ``count`` rows from ``first``."""
        rows = _SLOT.iter_unpack(self._map[_at(first) : _at(first + count)])
        return [Running(first + n, *row) for n, row in enumerate(rows) if row[0] in tokens]

    def clear(self, first: int, count: int) -> None:
        """Empty a range of slots: their process is gone and its verdicts are stored."""
        self._map[_at(first) : _at(first + count)] = bytes(count * _SLOT.size)

    # -- headers --------------------------------------------------------------------------------

    def sign(self, slot: int, pid: int, beat: float) -> None:
        """Make a slot the header of a share."""
        _SLOT.pack_into(self._map, _at(slot), _HEADER, pid, beat, 0.0)

    def beat(self, slot: int, now: float) -> None:
        """Say that the clerk of a process has run: nobody keeps the interpreter lock from it."""
        _TIME.pack_into(self._map, _at(slot) + 16, now)

    def beat_of(self, slot: int) -> float:
        """When the clerk of a process last ran."""
        return float(_TIME.unpack_from(self._map, _at(slot) + 16)[0])

    def set_waiting(self, slot: int, pid: int, waiting: int) -> None:
        """Say how many jobs of a process wait for other jobs."""
        _TOKEN.pack_into(self._map, _at(slot) + 8, pid | waiting << 32)

    def waiting(self, share: int) -> int:
        """How many jobs of all processes, with so many rows each, wait for other jobs."""
        if os.fstat(self._fd).st_size > len(self._map):
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        starts = range(_at(0), len(self._map), share * _SLOT.size)
        heads = (self._map[at : at + 16] for at in starts)
        words = [struct.unpack("=QQ", head) for head in heads if len(head) == 16]
        return sum(word >> 32 for mark, word in words if mark == _HEADER)

    def mark_unkillable(self, slot: int, since: float) -> None:
        """Say since when (wall time) a process has outlived its SIGKILL."""
        _TIME.pack_into(self._map, _at(slot) + 24, since)

    def close(self) -> None:
        """Unmap; the file stays for whoever needs it."""
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Unmap and delete the file."""
        self.close()
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass


def _rows(
    path: str, owner_id: str, folder: Folder | None = None
) -> list[tuple[int, int, float, float]] | None:
    """All rows of an owner's board; None when no board of it is left.

    With ``folder`` the board is looked for there under its name: the owner may have seen the same
    folder under another path. A file that is torn is read as far as it goes.
    """
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


def read_board(path: str, owner_id: str, folder: Folder | None = None) -> dict[int, float] | None:
    """Return the tokens of the jobs a dead owner ran, with their start; None without a board.

    Tokens of jobs that are settled may be among them.
    """
    rows = _rows(path, owner_id, folder)
    if rows is None:
        return None
    return {token: started for token, _, started, _ in rows if token != _HEADER}


def read_unkillable(path: str, owner_id: str) -> list[tuple[int, float]]:
    """Processes of an owner that have outlived their SIGKILL, and since when (wall time)."""
    rows = _rows(path, owner_id) or []
    return [
        (word & 0xFFFFFFFF, since)
        for mark, word, _, since in rows
        if mark == _HEADER and since
    ]


def _found(path: str, folder: Folder | None) -> int:
    """A descriptor of the board, which is a regular file."""
    above, name = os.path.split(path)
    if folder is not None:
        try:
            return folder.open(name, os.O_RDONLY)
        except FileNotFoundError:
            pass  # a worker without a folder of its broker's has the board among temporary files
    with contextlib.closing(Folder(above or ".")) as there:
        return there.open(name, os.O_RDONLY)


def _is_at(path: str, fd: int) -> bool:
    """True when the file that is open is the one the path names."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def sweep_boards(folder: Folder, listed: Collection[str]) -> None:
    """Delete boards left by the dead: their names not ``listed``, and not claimed by who lives.

    Called while the list of owners cannot change. Files that are no board, or another user's, are
    left.
    """
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
            pass  # somebody has it
        finally:
            os.close(fd)


def remove_board(path: str, owner_id: str, folder: Folder | None = None) -> None:
    """Delete the board of an owner that is gone, unless the file is somebody else's."""
    if read_board(path, owner_id, folder) is None:
        return
    try:
        if folder is None or not folder.remove(os.path.basename(path)):
            os.unlink(path)
    except OSError:
        pass
