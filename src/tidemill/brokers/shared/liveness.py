"""Detect dead owners: the kernel hangs up the FIFO of an owner when the owner's process dies.

An owner holds the reading end of its FIFO and never reads. To check an owner, a process opens the
writing end, which fails when no process holds the reading end. To watch an owner, a process keeps
the writing end open and polls it along with its other descriptors. The kernel reports the death of
the reader at once, whatever its cause, in every container that shares the directory. This needs no
thread and no repeated checks. Children forked by user code would keep the FIFO open, so they close
their copy at once (:meth:`Liveness.after_fork_child`).

An owner's FIFO is made before the owner is listed. So a FIFO that nobody holds may be removed if
its number is not on the list: its owner left, was given up, or died before it was listed. Numbers
are never reused, so a name never belongs to another owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
from collections.abc import Collection, Iterable, Sequence

from tidemill.core.files import Folder
from tidemill.core.locks import Lock
from tidemill.errors import BrokerUnavailable

WATCHED, WATCHED_MOST = 8, 100  # owners that an owner watches, and a worker at most


class Liveness:
    """The FIFOs that this process holds, and the FIFOs that it watches."""

    def __init__(self, folder: str | Folder | None) -> None:
        """``folder`` is an open folder, None, or a path; a missing path is made again."""
        self._path = folder if isinstance(folder, str) else ""
        self._open_folder = None if isinstance(folder, str) else folder
        self._held: dict[int, int] = {}
        self._holding = Lock()
        self._watched: dict[int, int] = {}
        self._make()

    @property
    def _folder(self) -> Folder:
        """The folder. A path is opened again after the system has cleared away old files."""
        folder = self._open_folder
        if folder is None or (self._path and not folder.there):
            folder = self._open_folder = Folder(self._path)
        return folder

    def _make(self) -> None:
        if self._path:
            os.makedirs(self._path, mode=0o700, exist_ok=True)

    def path(self, number: int) -> str:
        return os.path.join(self._folder.path, _name_of(number))

    def hold(self, number: int) -> None:
        """Hold the FIFO of an owner, before the owner is listed. Never blocks."""
        with self._holding:
            if number not in self._held:
                self._hold(number)

    def _hold(self, number: int) -> None:
        # No process may see the FIFO before this process holds it. An existing file of this name
        # belongs to an old store.
        self._make()
        name = _name_of(number)
        self._folder.remove(name + ".new")
        self._held[number] = self._folder.make_fifo(name + ".new", os.O_RDONLY)
        self._folder.rename(name + ".new", name)

    def keep(self) -> None:
        """Touch held FIFOs, since systems clear old files from temporary folders."""
        with self._holding:
            for number, fd in list(self._held.items()):
                try:
                    self._folder.touch(_name_of(number))
                except FileNotFoundError:
                    self._hold(number)
                    os.close(fd)  # the close wakes watchers, which then find the new FIFO

    def let_go(self, number: int) -> None:
        with self._holding:
            fd = self._held.pop(number, None)
            if fd is not None:
                self.remove(number)
                os.close(fd)

    def alive(self, number: int) -> bool:
        """True while the owner's process lives and holds its FIFO."""
        # True also when this process has no descriptor left or may not open the FIFO.
        if number in self._held:
            return True
        try:
            fd = self._open(number)
        except OSError:
            return True
        if fd is None:
            return False
        os.close(fd)
        return True

    def is_here(self, number: int) -> bool:
        """True when the owner has a FIFO: the owner lives, or died, on this machine."""
        try:
            return self._folder.stat(_name_of(number)) is not None
        except FileNotFoundError:
            return False

    def _open(self, number: int) -> int | None:
        """The writing end; None when no process holds the reading end."""
        try:
            return self._folder.open_fifo(_name_of(number), os.O_WRONLY)
        except BrokerUnavailable:  # the file is no FIFO, so no process holds it
            return None
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):  # no reader, or no file
                return None
            raise

    def watch(self, numbers: Iterable[int]) -> tuple[list[int], bool]:
        """Descriptors that become ready when an owner dies, and True if an owner is dead now."""
        fds, gone = [], False
        for number in numbers:
            fd = self._watched.get(number)
            if fd is None and number not in self._held:
                try:
                    fd = self._open(number)
                except OSError:
                    # This owner is not watched; the next check of all owners detects its death.
                    continue
                if fd is None:
                    gone = True
                    continue
                self._watched[number] = fd
            if fd is not None:
                fds.append(fd)
        return fds, gone

    def unwatch(self, wanted: Collection[int]) -> None:
        for number in [n for n in self._watched if n not in wanted]:
            os.close(self._watched.pop(number))

    def unwatch_ended(self) -> None:
        """Close FIFOs without a reader: their owners died, or have made a new FIFO."""
        ends = select.poll()
        numbers = {fd: number for number, fd in self._watched.items()}
        for fd in numbers:
            ends.register(fd, 0)  # errors and the end are always reported
        for fd, _ in ends.poll(0):
            os.close(self._watched.pop(numbers[fd]))

    def sweep(self, listed: Collection[int]) -> None:
        """Remove the files of owners that are neither listed nor alive: they died in between."""
        for name in self.names():
            number = _number_in(name)
            if number in listed or name.endswith(".new") or self.alive(number):
                continue
            with contextlib.suppress(OSError):  # fails for a file of another user
                self._folder.remove(name)

    def names(self) -> list[str]:
        """The files of the folder; none when the folder was cleared away."""
        try:
            return self._folder.names()
        except FileNotFoundError:
            return []

    def remove(self, number: int) -> None:
        try:
            self._folder.remove(_name_of(number))
        except FileNotFoundError:
            pass  # the folder was cleared away

    def after_fork_child(self) -> None:
        """Close the copies of the parent's FIFOs, which would make a dead parent seem alive."""
        for fd in (*self._held.values(), *self._watched.values()):
            os.close(fd)
        self._held, self._watched = {}, {}
        self._holding = Lock()  # another thread of the parent may have held the lock


def _name_of(number: int) -> str:
    return f"{number}.fifo"


def _number_in(name: str) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def neighbours(mine: int, owners: Sequence[tuple[int, bool]]) -> list[int]:
    """The owners that an owner watches: the owners after it in a ring of (number, is a worker).

    A worker watches all owners up to the second worker after it. So two workers watch each owner,
    if there are two other workers. Consumers alone are not enough, since they poll only while they
    wait.
    """
    ring = [row for row in owners if row[0] > mine] + [row for row in owners if row[0] < mine]
    most = WATCHED
    if (mine, True) in owners:
        workers = [at for at, (_, worker) in enumerate(ring, 1) if worker]
        most = max(WATCHED, workers[1] if len(workers) > 1 else len(ring))
        most = min(most, WATCHED_MOST)
    return [number for number, _ in ring[:most]]
