"""Who is alive: one locked file per owner, and threads that wait for a lock to come free.

The kernel frees a ``flock`` when its process dies, however it dies, and wakes who waits for it; so
a death is known at once, in every container that shares the directory, without a poll. Children
forked by a user's code would keep the lock alive: they close their copy at once
(:func:`Liveness.after_fork_child`).

An owner holds its lock alone; who asks or watches takes it shared, so that the curious do not take
each other for the owner. Owners watch each other in a ring, each the next two by number.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable

__all__ = ["Liveness"]

WATCHED = 2


class Liveness:
    """The locks this process holds, and those it waits for."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        os.makedirs(folder, exist_ok=True)
        self._held: dict[int, int] = {}
        self._watching: set[int] = set()
        self._lock = threading.Lock()

    def path(self, number: int) -> str:
        """The lock file of an owner."""
        return os.path.join(self._folder, f"{number}.lock")

    def hold(self, number: int) -> None:
        """Be alive as this owner."""
        fd = os.open(self.path(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._held[number] = fd

    def let_go(self, number: int) -> None:
        """No longer be this owner."""
        fd = self._held.pop(number, None)
        if fd is not None:
            self.forget(number)
            os.close(fd)

    def forget(self, number: int) -> None:
        """Delete the file of an owner that is gone."""
        try:
            os.unlink(self.path(number))
        except FileNotFoundError:
            pass

    def alive(self, number: int) -> bool:
        """True while the owner's process has not died or let go."""
        if number in self._held:
            return True
        try:
            fd = os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def watch(self, mine: int, owners: list[int], died: Callable[[], None]) -> None:
        """Have ``died`` called, from another thread, when one of the next owners dies or leaves."""
        others = sorted(n for n in owners if n not in self._held)
        ring = [n for n in others if n > mine] + [n for n in others if n < mine]
        for number in ring[:WATCHED]:
            with self._lock:
                if number in self._watching:
                    continue
                self._watching.add(number)
            threading.Thread(
                target=self._await_end,
                args=(number, died),
                name=f"tidemill-watch-{number}",
                daemon=True,
            ).start()

    def _await_end(self, number: int, died: Callable[[], None]) -> None:
        try:
            fd = os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1
        try:
            if fd >= 0:
                fcntl.flock(fd, fcntl.LOCK_SH)
        finally:
            if fd >= 0:
                os.close(fd)
            with self._lock:
                self._watching.discard(number)
        died()

    def after_fork_child(self) -> None:
        """Close the copies of the parent's locks, or they would outlive it."""
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()
        self._watching.clear()
        self._lock = threading.Lock()
