"""Waking sleepers in other processes without polling.

A mapped file holds one slot per sleeper, and a bitmap of the marked slots. The file changes only
under the store's write lock, except for one byte of each slot (:meth:`WakeUps.set_waiting`). An
owner with nothing to do marks its slot and sleeps on a FIFO. A writer, still inside its
transaction, picks sleepers for its jobs, writes one byte to each FIFO and clears their marks. By
the :class:`SleeperWant` beside a mark it can lease in the sleeper's name (``hand_over`` of
:mod:`..claim.exchange`).

At least one sleeper wakes at the next due time of the store (:meth:`WakeUps.keep_time`). No sleeper
trusts a hint, which may be late, doubled or needless. A hint is lost with a sleeper that dies. Then
other processes notice the death (:mod:`tidemill.brokers.shared.liveness`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tidemill.core.files import Folder
from tidemill.core.scoreboard import allocate
from tidemill.core.signals import InterruptibleWait, write_unkilled
from tidemill.errors import BrokerUnavailable

TASKS, MESSAGES, RESULT, SPACE = 1, 2, 4, 8  # kinds of waits
ALL = 2**64 - 1
LOOK, LEASED, COMMITTED = b"x", b"p", b"g"
"""Hints: look into the store; a put leases to the sleeper; that put is committed."""

_SLOTS = 2048
# The fields of a slot: taken, mask of the kinds, 1 while the owner waits, digest of the only queue
# (0 for several or all), owner, bloom of queues or ids, end of the wait. The want of the owner
# (``_TERMS``) follows.
_SLOT = struct.Struct("=BBBxIQQQ")
_TERMS = struct.Struct("=HBB15I")  # room, mode, number of queues (255: all), queues
_SIZE = _SLOT.size + _TERMS.size
_WAITS = 2  # offset in a slot of the byte for an owner in its wait
_QUEUES, _ALL_QUEUES = 15, 255
_UNCERTAIN = -1  # stands for a descriptor that this process cannot open
_HEAD = struct.Struct("=II")  # highest slot in use, slot whose sleep ends first as far as is known
_MARKED = _SIZE * (_SLOTS + 1)  # offset of the bitmap, in which bit N stands for slot N
_NOBODY = bytes(_SLOTS // 8 + 1)
_FILE = _MARKED + len(_NOBODY)


def bloom(names: Sequence[str]) -> int:
    """A 64-bit set of these names, which may also seem to contain other names."""
    bits = 0
    for name in names:
        bits |= 1 << (zlib.crc32(name.encode()) & 63)
    return bits


def digest(name: str) -> int:
    """A number for one name, never 0."""
    return zlib.crc32(name.encode()) or 1


class SleeperWant(NamedTuple):
    """The jobs that a sleeper would take if awake; queues by number, None for all queues."""

    room: int
    mode: int
    queues: tuple[int, ...] | None


NOTHING = SleeperWant(0, 0, ())


class Sleeper:
    """One place to sleep: a slot and the FIFO that belongs to it."""

    __slots__ = ("_words", "fd", "slot")

    def __init__(self, slot: int, fd: int) -> None:
        self.slot = slot
        self.fd = fd
        self._words = b""  # the hints that came last

    def drain(self) -> bytes:
        """Take all hints off the FIFO, and return the last of them."""
        words = b""
        try:
            while len(words := os.read(self.fd, 4096)) == 4096:
                pass
        except BlockingIOError:
            pass
        self._words = words or self._words
        return words

    def has_lease(self, patience: float) -> bool:
        """True when hints told of a lease, and its commit ends within ``patience`` seconds."""
        # A hint is told once.
        if not self._words:
            return False
        until = time.monotonic() + patience
        while (words := self._words).rfind(LEASED) > words.rfind(COMMITTED):
            left = until - time.monotonic()
            if left <= 0:
                break
            self.wait(left)
        self._words = b""
        return COMMITTED in words

    def wake(self) -> None:
        """End the sleep, from any thread."""
        try:
            os.write(self.fd, b"x")
        except BlockingIOError:
            pass  # the FIFO is full of hints
        except OSError:
            pass  # the FIFO was closed a moment ago

    def wait(self, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        """Sleep until a hint, a readable descriptor or the timeout (seconds)."""
        poll = select.poll()
        for fd in (self.fd, *fds):
            poll.register(fd, select.POLLIN)
        millis = None if timeout > 86400 else max(0, -int(-timeout * 1000 // 1))
        with InterruptibleWait():
            ready = [fd for fd, _ in poll.poll(millis)]
        if self.fd in ready:
            ready.remove(self.fd)
            self.drain()
        return ready


class WakeUps:
    """All slots of a store, as this process sees them."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        fd = folder.create("slots")
        try:
            if os.fstat(fd).st_size < _FILE:
                allocate(fd, _FILE)
            self._map = mmap.mmap(fd, _FILE)
        except BaseException:
            os.close(fd)
            raise
        # A process without a free descriptor closes one of these to hint another sleeper. Slot 0
        # is no sleeper's: its descriptor is kept for this.
        self._writers = {0: fd}

    @staticmethod
    def _fifo(slot: int) -> str:
        return f"{slot}.fifo"

    # -- all below: under the write lock --------------------------------------------------------

    def take(self, owner: int = 0) -> Sleeper:
        """Take a free slot with its FIFO, or a slot whose process is gone."""
        high, _ = _HEAD.unpack_from(self._map)
        for slot in range(1, _SLOTS + 1):
            if slot > high:
                _HEAD.pack_into(self._map, 0, slot, _HEAD.unpack_from(self._map)[1])
            else:
                # Open the FIFO again: a cached descriptor does not show that the reader is gone.
                self._forget_writer(slot)
                if self._map[slot * _SIZE] and self._writer(slot) is not None:
                    continue
            try:
                fd = self._open_fifo(slot)
            except (PermissionError, BrokerUnavailable):
                continue  # not our FIFO, or no FIFO: try the next slot
            self._forget_writer(slot)
            self._set_mask(slot, 0)
            _SLOT.pack_into(self._map, slot * _SIZE, 1, 0, 0, 0, owner, 0, 0)
            return Sleeper(slot, fd)
        raise OSError(errno.EMFILE, f"all {_SLOTS} places to wait in the store are taken")

    def _open_fifo(self, slot: int) -> int:
        """Open both ends of the slot's FIFO: with both open, a read never gets an end-of-file."""
        name = self._fifo(slot)
        self._folder.mend(name)
        try:
            return self._folder.open_fifo(name, os.O_RDWR)
        except FileNotFoundError:
            return self._folder.make_fifo(name, os.O_RDWR)

    def set_waiting(self, sleeper: Sleeper, waiting: bool) -> None:
        """Set whether the sleeper's owner is in its wait. This sets one byte, and needs no lock."""
        if sleeper.fd >= 0:
            self._map[sleeper.slot * _SIZE + _WAITS] = waiting

    def give_up(self, sleeper: Sleeper) -> None:
        """Free a slot. Idempotent, since a commit may be replayed."""
        if sleeper.fd < 0:
            return
        self._set_mask(sleeper.slot, 0)
        self._map[sleeper.slot * _SIZE] = 0
        self._forget_writer(sleeper.slot)
        self.close_sleeper(sleeper)

    @staticmethod
    def close_sleeper(sleeper: Sleeper) -> None:
        """Close a FIFO, also without the lock: others then find that the slot is free."""
        if sleeper.fd >= 0:
            fd, sleeper.fd = sleeper.fd, -1
            os.close(fd)

    def mark(
        self,
        sleeper: Sleeper,
        mask: int,
        bits: int,
        until: int = ALL,
        only: int = 0,
        terms: SleeperWant = NOTHING,
    ) -> None:
        """Mark a slot as asleep, with kinds of hint, a bloom of queues or ids, and an end time."""
        # ``only`` is the :func:`digest` of the queue when the sleeper waits for a single queue.
        self.set_waiting(sleeper, False)
        at = sleeper.slot * _SIZE
        struct.pack_into("=I", self._map, at + 4, only)
        struct.pack_into("=QQ", self._map, at + 16, bits, until)
        self._set_terms(at + _SLOT.size, terms)
        self._set_mask(sleeper.slot, mask)
        high, early = _HEAD.unpack_from(self._map)
        if mask & (TASKS | MESSAGES) and until <= self._wait_for_jobs(early)[1]:
            _HEAD.pack_into(self._map, 0, high, sleeper.slot)

    def _wait_for_jobs(self, slot: int) -> tuple[int, int]:
        """The mask and the end of a sleeper that takes jobs; (0, ``ALL``) for another slot."""
        taken, mask, _, _, _, _, until = _SLOT.unpack_from(self._map, slot * _SIZE)
        return (mask, until) if slot and taken and mask & (TASKS | MESSAGES) else (0, ALL)

    def unmark(self, slot: int, owner: int) -> None:
        """Clear the mark of an owner that now sleeps in another slot, and would miss hints here."""
        if _SLOT.unpack_from(self._map, slot * _SIZE)[4] == owner:
            self._set_mask(slot, 0)

    def _set_mask(self, slot: int, mask: int) -> None:
        # The bit is set before the mark, and cleared after the mark. So a kill in between leaves a
        # bit without a mark, which costs only a needless look. A mark without a bit would lose a
        # wake-up.
        at, bit = _MARKED + (slot >> 3), 1 << (slot & 7)
        if mask:
            self._map[at] |= bit
        self._map[slot * _SIZE + 1] = mask
        if not mask:
            self._map[at] &= ~bit

    def _marked(self) -> Iterator[int]:
        """The slots that are marked now, the lowest first."""
        bits = int.from_bytes(self._map[_MARKED:], "little")
        while bits:
            lowest = bits & -bits
            yield lowest.bit_length() - 1
            bits ^= lowest

    def _set_terms(self, at: int, terms: SleeperWant) -> None:
        room, mode, queues = terms
        numbers = [0] * _QUEUES
        if queues:
            numbers[: len(queues)] = queues[:_QUEUES]
        count = _ALL_QUEUES if queues is None else min(len(queues), _QUEUES)
        _TERMS.pack_into(self._map, at, min(room, 0xFFFF), mode, count, *numbers[:_QUEUES])

    def want_of(self, slot: int) -> SleeperWant:
        """The want that a sleeper left beside its mark."""
        room, mode, count, *numbers = _TERMS.unpack_from(self._map, slot * _SIZE + _SLOT.size)
        return SleeperWant(room, mode, None if count == _ALL_QUEUES else tuple(numbers[:count]))

    def anyone(self) -> bool:
        """False when certainly nobody sleeps."""
        return self._map[_MARKED:] != _NOBODY

    def ring(
        self,
        kind: int,
        bits: int = ALL,
        most: int = _SLOTS,
        only: int = 0,
        give: Callable[[int, SleeperWant], int] | None = None,
    ) -> int:
        """Hint up to ``most`` sleepers that wait for this kind and these bits; return their number.

        With ``only`` the hint is for one queue. A sleeper that waits for only one other queue with
        the same bit gets no hint. A sleeper for several queues gets a hint, but does not count: its
        bit may stand for another queue. ``give`` is called with the owner and the want of each
        hinted sleeper that is in its wait. It returns the number of jobs that this owner got.
        """
        rung = 0
        for slot, certain, waits, owner in self.matching(kind, bits, only):
            if self.wake(slot):
                given = give(owner, self.want_of(slot)) if give is not None and waits else 0
                rung += given or certain
                if rung >= most:
                    break
        return rung

    def matching(self, kind: int, bits: int, only: int) -> Iterator[tuple[int, bool, bool, int]]:
        """(slot, certain, waits, owner) of the sleepers that :meth:`ring` may hint."""
        # ``certain`` is False for a sleeper that may want other queues only. ``waits`` is True for
        # an owner in its wait.
        for slot in self._marked():
            taken, mask, waits, single, owner, wanted, _ = _SLOT.unpack_from(
                self._map, slot * _SIZE
            )
            if taken and mask & kind and wanted & bits and (not only or single in (0, only)):
                certain = not only or single == only or wanted == ALL
                yield slot, certain, bool(waits), owner

    def keep_time(self, due: int) -> None:
        """Ensure that at least one sleeper that takes jobs wakes at ``due``."""
        # The sleeper that wakes early is asked first, so the others are rarely looked at.
        _, early = _HEAD.unpack_from(self._map)
        mask, until = self._wait_for_jobs(early)
        if until <= due or (mask and self.wake(early)):
            return
        late = []
        for slot in self._marked():
            mask, until = self._wait_for_jobs(slot)
            if until <= due:
                return
            if mask:
                late.append(slot)
        for slot in late:
            if self.wake(slot):
                return

    def tell_time(self, due: int) -> None:
        """Ensure that all sleepers that take jobs wake at ``due``."""
        for slot in list(self._marked()):
            mask, until = self._wait_for_jobs(slot)
            if mask and until > due:
                self.wake(slot)

    def ring_owner(self, owner: int) -> None:
        """Hint every slot of an owner, asleep or not: the store has a command for the owner."""
        self._ring_each(lambda whose: whose == owner)

    def ring_others(self, owner: int) -> None:
        """Hint every slot of all other owners, asleep or not: this owner is new."""
        self._ring_each(lambda whose: whose not in (0, owner))

    def ring_owners(self) -> None:
        """Hint every slot of every owner, asleep or not."""
        self._ring_each(bool)

    def _ring_each(self, meant: Callable[[int], bool]) -> None:
        high, _ = _HEAD.unpack_from(self._map)
        for slot in range(1, high + 1):
            taken, _, _, _, whose, _, _ = _SLOT.unpack_from(self._map, slot * _SIZE)
            if taken and meant(whose):
                self._hint(slot)

    def wake(self, slot: int, word: bytes = LOOK) -> bool:
        """Hint a sleeper and clear its mark; the mark stays if this process cannot hint it."""
        # The hint comes first. A kill in between leaves the mark, which costs only a needless hint.
        hinted = self._hint(slot, word)
        if hinted or not self._map[slot * _SIZE]:
            self._set_mask(slot, 0)
        return hinted

    def _hint(self, slot: int, word: bytes = LOOK) -> bool:
        writer = self._writer(slot)
        if writer is None:
            self._map[slot * _SIZE] = 0  # the process of the sleeper is gone
            return False
        if writer == _UNCERTAIN:
            return False
        try:
            write_unkilled(writer, word)
        except BlockingIOError:
            pass  # the FIFO is full of hints
        except OSError:
            self._forget_writer(slot)
            self._map[slot * _SIZE] = 0
            return False
        return True

    def confirm(self, slot: int) -> None:
        """Tell a sleeper that was just hinted of the commit; this changes no slot."""
        # The write lock is free by now, and the slot may be another sleeper's.
        with contextlib.suppress(KeyError, OSError):
            write_unkilled(self._writers[slot], COMMITTED)

    def _writer(self, slot: int) -> int | None:
        """A descriptor that writes to the slot's FIFO; None when nobody reads it."""
        # ``_UNCERTAIN`` when this process may not open the FIFO, or has no descriptor left.
        while slot not in self._writers:
            try:
                self._writers[slot] = self._folder.open_fifo(self._fifo(slot), os.O_WRONLY)
            except BrokerUnavailable:
                return _UNCERTAIN
            except OSError as error:
                if error.errno in (errno.ENXIO, errno.ENOENT):  # no reader, or no FIFO
                    return None
                if error.errno != errno.EMFILE or not self._writers:
                    return _UNCERTAIN
                self._forget_writer(next(iter(self._writers)))
        return self._writers[slot]

    def _forget_writer(self, slot: int) -> None:
        fd = self._writers.pop(slot, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for slot in list(self._writers):
            self._forget_writer(slot)
        self._map.close()
