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

import errno
import os
import threading
from collections.abc import Collection, Iterable, Sequence

__all__ = ["WATCHED", "Liveness", "neighbours"]

WATCHED, WATCHED_MOST = 8, 100
"""How many of the next owners an owner watches, and how many a worker at most: descriptors."""


class Liveness:
    """The FIFOs this process holds, and those it watches."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        os.makedirs(folder, exist_ok=True)
        self._held: dict[int, int] = {}
        self._holding = threading.Lock()
        self._watched: dict[int, int] = {}

    def path(self, number: int) -> str:
        """The FIFO of an owner."""
        return os.path.join(self._folder, f"{number}.fifo")

    def hold(self, number: int) -> None:
        """Be alive as this owner. Under the write lock, if the store has one; never blocks."""
        with self._holding:
            self._hold(number)

    def _hold(self, number: int) -> None:
        # Nobody may see it while nobody holds it. One of that name is of an earlier store here.
        os.makedirs(self._folder, exist_ok=True)
        new = self.path(number) + ".new"
        self._remove(f"{number}.fifo.new")
        os.mkfifo(new, 0o600)
        self._held[number] = os.open(new, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.rename(new, self.path(number))

    def keep(self) -> None:
        """Show that what is held is in use: old files are cleared from where temporary ones lie."""
        with self._holding:
            for number, fd in list(self._held.items()):
                try:
                    os.utime(self.path(number))
                except FileNotFoundError:
                    self._hold(number)
                    os.close(fd)  # who watches looks, and finds the new one

    def let_go(self, number: int) -> None:
        """No longer be this owner."""
        with self._holding:
            fd = self._held.pop(number, None)
            if fd is not None:
                self._remove(f"{number}.fifo")
                os.close(fd)

    def alive(self, number: int) -> bool:
        """True while the owner's process has not died or let go."""
        if number in self._held:
            return True
        fd = self._open(number)
        if fd is None:
            return False
        os.close(fd)
        return True

    def is_here(self, number: int) -> bool:
        """True when there is a FIFO of the owner: it lives, or died, on this machine."""
        return os.path.exists(self.path(number))

    def _open(self, number: int) -> int | None:
        """The writing end; None when nobody holds the other."""
        try:
            return os.open(self.path(number), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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
                fd = self._open(number)
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
                self._remove(name)

    def names(self) -> list[str]:
        """The files that are here; none where the folder was cleared away."""
        try:
            return os.listdir(self._folder)
        except FileNotFoundError:
            return []

    def remove(self, number: int) -> None:
        """Remove the file of an owner that is gone."""
        self._remove(f"{number}.fifo")

    def _remove(self, name: str) -> None:
        try:
            os.unlink(os.path.join(self._folder, name))
        except FileNotFoundError:
            pass

    def after_fork_child(self) -> None:
        """Close the copies of what the parent holds, or they would outlive it."""
        for fd in (*self._held.values(), *self._watched.values()):
            os.close(fd)
        self._held, self._watched = {}, {}
        self._holding = threading.Lock()  # another thread of the parent may have had it


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
