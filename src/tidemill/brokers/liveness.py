"""Who is alive: one FIFO per owner, which the kernel hangs up when the owner's process dies.

An owner holds the reading end of a FIFO of its own and never reads. Who asks whether it is alive
opens the writing end, which fails when nobody holds the other; who watches it keeps the writing end
and polls it, beside whatever else it sleeps on: the kernel says at once that the reader has gone,
however it died, in every container that shares the directory. No thread, and nothing to poll again.
Children forked by a user's code would keep the FIFO held: they close their copy at once
(:meth:`Liveness.after_fork_child`).

A FIFO is made, and a stray one removed, only under the store's write lock, and it is made in the
commit that puts its owner on the list. So a number that is not on the list of a commit has no FIFO
that is needed: its owner left, was given up, or died before it was ever seen. Numbers are never
used again, so a name never comes to mean another file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterable, Sequence

from tidemill.errors import BrokerUnavailable
from tidemill.files import Folder
from tidemill.locks import Lock

__all__ = ["WATCHED", "Liveness", "neighbours"]

WATCHED, WATCHED_MOST = 8, 100
"""How many of the next owners an owner watches, and how many a worker at most: descriptors."""


class Liveness:
    """The FIFOs this process holds, and those it watches."""

    def __init__(self, folder: str | Folder | None) -> None:
        """``folder`` is open, or a path, where it is made whenever it is missing; None for none."""
        self._path = folder if isinstance(folder, str) else ""
        self._open_folder = None if isinstance(folder, str) else folder
        self._held: dict[int, int] = {}
        self._holding = Lock()
        self._watched: dict[int, int] = {}
        self._make()

    @property
    def _folder(self) -> Folder:
        """The folder; of a path the one that is there now, since old files may be cleared away."""
        folder = self._open_folder
        if folder is None or (self._path and not folder.there):
            folder = self._open_folder = Folder(self._path)
        return folder

    def _make(self) -> None:
        if self._path:
            os.makedirs(self._path, mode=0o700, exist_ok=True)

    def path(self, number: int) -> str:
        """The FIFO of an owner."""
        return os.path.join(self._folder.path, _name_of(number))

    def hold(self, number: int) -> None:
        """Be alive as this owner. Under the write lock, if the store has one; never blocks.

        Idempotent, since a commit may be replayed.
        """
        with self._holding:
            if number not in self._held:
                self._hold(number)

    def _hold(self, number: int) -> None:
        # Nobody may see it while nobody holds it. One of that name is of an earlier store here.
        self._make()
        name = _name_of(number)
        self._folder.remove(name + ".new")
        self._held[number] = self._folder.make_fifo(name + ".new", os.O_RDONLY)
        self._folder.rename(name + ".new", name)

    def keep(self) -> None:
        """Show that what is held is in use: old files are cleared from where temporary ones lie."""
        with self._holding:
            for number, fd in list(self._held.items()):
                try:
                    self._folder.touch(_name_of(number))
                except FileNotFoundError:
                    self._hold(number)
                    os.close(fd)  # who watches looks, and finds the new one

    def let_go(self, number: int) -> None:
        """No longer be this owner."""
        with self._holding:
            fd = self._held.pop(number, None)
            if fd is not None:
                self.remove(number)
                os.close(fd)

    def alive(self, number: int) -> bool:
        """True while the owner's process has not died or let go.

        An owner is not dead because this process has no descriptor left, or may not open its FIFO.
        """
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
        """True when there is a FIFO of the owner: it lives, or died, on this machine."""
        try:
            return self._folder.stat(_name_of(number)) is not None
        except FileNotFoundError:
            return False

    def _open(self, number: int) -> int | None:
        """The writing end; None when nobody holds the other."""
        try:
            return self._folder.open_fifo(_name_of(number), os.O_WRONLY)
        except BrokerUnavailable:  # no FIFO: nobody holds it
            return None
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):  # no reader; removed
                return None
            raise

    # -- watching -------------------------------------------------------------------------------

    def watch(self, numbers: Iterable[int]) -> tuple[list[int], bool]:
        """Descriptors that poll as ready once one of the owners is gone, and whether one is now."""
        fds, gone = [], False
        for number in numbers:
            fd = self._watched.get(number)
            if fd is None and number not in self._held:
                try:
                    fd = self._open(number)
                except OSError:
                    continue  # it cannot be watched now; the next look at all owners sees to it
                if fd is None:
                    gone = True
                    continue
                self._watched[number] = fd
            if fd is not None:
                fds.append(fd)
        return fds, gone

    def unwatch(self, wanted: Collection[int]) -> None:
        """Close what nobody here watches any more."""
        for number in [n for n in self._watched if n not in wanted]:
            os.close(self._watched.pop(number))

    # -- sweeping -------------------------------------------------------------------------------

    def sweep(self, listed: Collection[int]) -> None:
        """Remove the files of owners off the list. Under the write lock, with the list there."""
        for name in self.names():
            if _number_in(name) not in listed:
                with contextlib.suppress(OSError):  # another user's file
                    self._folder.remove(name)

    def names(self) -> list[str]:
        """The files that are here; none where the folder was cleared away."""
        try:
            return self._folder.names()
        except FileNotFoundError:
            return []

    def remove(self, number: int) -> None:
        """Remove the file of an owner that is gone."""
        try:
            self._folder.remove(_name_of(number))
        except FileNotFoundError:
            pass  # the folder was cleared away

    def after_fork_child(self) -> None:
        """Close the copies of what the parent holds, or they would outlive it."""
        for fd in (*self._held.values(), *self._watched.values()):
            os.close(fd)
        self._held, self._watched = {}, {}
        self._holding = Lock()  # another thread of the parent may have had it


def _name_of(number: int) -> str:
    return f"{number}.fifo"


def _number_in(name: str) -> int:
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() else 0


def neighbours(mine: int, owners: Sequence[tuple[int, bool]]) -> list[int]:
    """Whom an owner watches, of (number, whether a worker): the next ones, all in a ring.

    A worker watches on up to the second worker after it. Consumers look only while they wait, so
    they cannot be left to each other; and each owner is seen by two workers if there are two.
    """
    ring = [row for row in owners if row[0] > mine] + [row for row in owners if row[0] < mine]
    most = WATCHED
    if (mine, True) in owners:
        workers = [at for at, (_, worker) in enumerate(ring, 1) if worker]
        most = max(WATCHED, workers[1] if len(workers) > 1 else len(ring))
        most = min(most, WATCHED_MOST)
    return [number for number, _ in ring[:most]]
