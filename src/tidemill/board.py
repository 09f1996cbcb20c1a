"""The board: a mapped file that says what a worker runs at this moment.

Worker processes write it, one slot per running job, and whoever outlives them reads it: the
supervisor, or, when everything died at once, the next worker to look. A token on the board was
running and used an attempt; a job handed out but not on the board was only prefetched (law 6).

It begins with the id of the owner it belongs to, so that nobody takes another's board for it. A
slot is (token, generation, started, deadline); the top bit of the generation says that the job
waits for another. Starting writes the token last, ending clears it first, so that a kill in between
never shows a job that does not run with another one's times.

Who claims a board holds a ``flock`` on it as long as it lives. Whoever finds one unlocked, and its
owner on no list, may remove it, and does so while holding the lock itself: a claim that waited for
that lock sees that its file is gone, and makes another.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Collection
from typing import NamedTuple

__all__ = ["Board", "Running", "allocate", "read_board", "remove_board", "sweep_boards"]

_OWNER = struct.Struct("=32s")
_TOKEN = struct.Struct("=Q")
_REST = struct.Struct("=Qdd")
_SLOT = struct.Struct("=QQdd")
_GENERATION = struct.Struct("=Q")
_WAITS = 1 << 63


def allocate(fd: int, size: int) -> None:
    """Make a file that is to be mapped ``size`` bytes long, with blocks of its own.

    Writing to a mapped hole when the disk is full ends the process with SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:  # macOS
        os.pwrite(fd, b"\0" * size, 0)


class Running(NamedTuple):
    """One occupied slot. ``started`` is wall time, ``deadline`` machine time, 0 for none.

    ``waits`` says that the job does nothing but wait for another one.
    """

    slot: int
    token: int
    generation: int
    started: float
    deadline: float
    waits: bool = False


class Board:
    """A board of ``slots`` slots, made or opened at ``path``."""

    def __init__(self, path: str, slots: int) -> None:
        self.path = path
        self.slots = slots
        self._open()

    def _open(self) -> None:
        size = _at(max(1, self.slots))
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(self._fd).st_size < size:
                allocate(self._fd, size)
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
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

    def start(
        self, slot: int, token: int, generation: int, started: float, deadline: float
    ) -> None:
        """Say that the slot runs the lease ``token`` from now on."""
        at = _at(slot)
        _REST.pack_into(self._map, at + 8, generation, started, deadline)
        _TOKEN.pack_into(self._map, at, token)

    def wait(self, slot: int, waits: bool) -> None:
        """Say that what runs in the slot waits for another job, or no longer does."""
        at = _at(slot) + _TOKEN.size
        (generation,) = _GENERATION.unpack_from(self._map, at)
        generation = generation | _WAITS if waits else generation & ~_WAITS
        _GENERATION.pack_into(self._map, at, generation)

    def end(self, slot: int) -> None:
        """Say that the slot is idle."""
        _TOKEN.pack_into(self._map, _at(slot), 0)

    def running(self, first: int = 0, count: int | None = None) -> list[Running]:
        """The occupied slots among ``count`` from ``first``."""
        last = self.slots if count is None else first + count
        rows = []
        for slot in range(first, last):
            token, generation, started, deadline = _SLOT.unpack_from(self._map, _at(slot))
            if token:
                waits = bool(generation & _WAITS)
                rows.append(Running(slot, token, generation & ~_WAITS, started, deadline, waits))
        return rows

    def clear(self, first: int, count: int) -> None:
        """Empty a range of slots: their process is gone and accounted for."""
        for slot in range(first, first + count):
            self.end(slot)

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


def _at(slot: int) -> int:
    return _OWNER.size + slot * _SLOT.size


def _claim(owner_id: str) -> bytes:
    claim = owner_id.encode()
    if not 0 < len(claim) <= _OWNER.size:
        raise ValueError(f"owner id {owner_id!r} must have 1 to {_OWNER.size} bytes")
    return claim.ljust(_OWNER.size, b"\0")


def read_board(path: str, owner_id: str) -> dict[int, float] | None:
    """The tokens that a dead owner was running, with their start; None when no board of it is left.

    A file that is torn is read as far as it goes.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return None
    if data[: _OWNER.size] != owner_id.encode().ljust(_OWNER.size, b"\0"):
        return None
    slots = data[_OWNER.size :]
    usable = len(slots) - len(slots) % _SLOT.size
    return {token: started for token, _, started, _ in _SLOT.iter_unpack(slots[:usable]) if token}


def _is_at(path: str, fd: int) -> bool:
    """True when the file that is open is the one the path names."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def sweep_boards(folder: str, listed: Collection[str]) -> None:
    """Delete boards left by the dead: their names not ``listed``, and not claimed by who lives.

    Called while the list of owners cannot change.
    """
    for name in os.listdir(folder):
        if name in listed:
            continue
        path = os.path.join(folder, name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, fd):
                os.unlink(path)
        except OSError:
            pass  # somebody has it
        finally:
            os.close(fd)


def remove_board(path: str, owner_id: str) -> None:
    """Delete the board of an owner that is gone, unless the file is somebody else's."""
    if read_board(path, owner_id) is not None:
        try:
            os.unlink(path)
        except OSError:
            pass
