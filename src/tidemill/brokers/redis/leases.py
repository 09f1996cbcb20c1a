"""Detection of dead owners, and the return of their leases.

An owner has two signs of life. On its own machine it holds a FIFO, which the kernel closes with the
process. On all machines it has an owner lease, which each of its steps renews.

    FIFO here, nobody holds it    dead at once: its scoreboard shows which jobs had started
    owner lease over              given up: no step has reached the store
    else                          alive

While the server is away, or this process is stopped, no owner can renew its lease. So if a process
hears from the server after half a lease of silence, it gives up no owner for ``RETURN`` seconds.

An owner gets its number and holds its FIFO before it is listed. The function that lists an owner
hints the owners of the same machine, which read the list and watch the new owner. If an owner dies
before anybody watches it, the next process that reads the list finds the dead owner.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.inspect import Inspection
from tidemill.brokers.redis.record import MICRO
from tidemill.brokers.shared.liveness import Liveness, neighbours
from tidemill.brokers.shared.lost_jobs import MOST_LOOKED_AT, log_failed
from tidemill.core.files import private_folder
from tidemill.core.locks import Lock
from tidemill.core.owner import Owner
from tidemill.core.scoreboard import read_scoreboard, remove_scoreboard
from tidemill.core.signals import SignalsDeferred

PRECEDENCE = 3.0
"""Seconds in which only processes on the dead owner's machine may release the owner. They can read
its scoreboard."""

RETURN = 5.0
"""Seconds that living owners have to renew their leases once the server answers again."""

_OWNER = msgspec.msgpack.Decoder(Owner)


class Watch:
    """The neighbours that one owner watches while it sleeps."""

    def __init__(self, number: int) -> None:
        self.number = number  # the owner's own number, 0 for an owner on another machine
        self.fds: list[int] = []
        self.numbers: list[int] = []
        self.seen = b""  # the state of the list when the neighbours were chosen


class Row(msgspec.Struct, frozen=True):
    """An owner on the list."""

    owner: Owner
    number: int


class ExpiredOwners:
    """The living and the dead owners of one store, as far as one process can tell.

    ``ours`` returns the ids of this process's owners. ``brisk`` connections have no patience,
    because a thread that reaps has deadlines to keep.
    """

    def __init__(
        self,
        lines: ServerConnections,
        brisk: ServerConnections,
        ours: Callable[[], Collection[str]],
        lease: float,
    ) -> None:
        self._lease = lease
        self._heard_at = float("inf")  # when the server last answered a step
        self._trusted_at = 0.0  # from this time on, owners whose lease is over may be given up
        self._lines = lines
        self._brisk = brisk
        self._ours = ours
        self._store = ""  # the store of the FIFOs: the server may come back with another store
        self._liveness: Liveness | None = None
        self._watches: list[Watch] = []
        self._watching = Lock()
        self._reaping = threading.Lock()

    # -- being alive ----------------------------------------------------------------------------

    def begin(self, owner: Owner) -> Watch:
        """Hold the FIFO of an owner, before the owner goes on the list."""
        self._heard_at = float("inf")
        number, store = (part.decode() for part in self._lines.call("owners", b"number", b""))
        watch = Watch(int(number) if owner.host == hostname() else 0)
        with self._watching:
            if store != self._store:
                self._move_to(store)
            if watch.number and self._liveness is not None:
                self._liveness.hold(watch.number)
                self._watches.append(watch)
        return watch

    def _move_to(self, store: str) -> None:
        if self._liveness is not None:
            for watch in self._watches:
                self._liveness.let_go(watch.number)
        self._liveness = Liveness(os.path.join(folder_here(), store))
        self._store, self._watches = store, []

    def heard(self, now: float) -> float:
        """Note that the server has answered a step; return when owners may be given up."""
        if now - self._heard_at > self._lease / 2:
            self._trusted_at = now + RETURN
        self._heard_at = now
        return self._trusted_at

    def _trusts(self) -> bool:
        """True when every living owner has had time to renew its lease at the server."""
        now = time.monotonic()
        return now - self._heard_at <= self._lease / 2 and now >= self._trusted_at

    def end(self, watch: Watch) -> None:
        """Close the FIFO of an owner that left the list."""
        with self._watching:
            if watch in self._watches and self._liveness is not None:
                self._watches.remove(watch)
                self._liveness.let_go(watch.number)
                self._unwatch()

    # -- watching -------------------------------------------------------------------------------

    def watch(self, watch: Watch, seen: bytes) -> None:
        """Choose the neighbours that an owner watches, after the list has changed."""
        if not watch.number or self._liveness is None:
            watch.seen = seen
            return
        rows = [row for row in self.rows(self._brisk) if row.owner.host == hostname()]
        near = [(row.number, row.owner.kind == "worker") for row in rows if row.number]
        ring = neighbours(watch.number, near)
        with self._watching:
            here = [number for number in ring if self._liveness.is_here(number)]
            watch.fds, gone = self._liveness.watch(here)
            watch.numbers, watch.seen = here, seen
            self._unwatch()
        if gone:  # a neighbour died before it could be watched
            self.reap()

    def forget(self, watch: Watch) -> None:
        """Forget the neighbours after a death; the next sleep chooses new neighbours."""
        watch.fds, watch.numbers, watch.seen = [], [], b""

    def _unwatch(self) -> None:
        assert self._liveness is not None
        self._liveness.unwatch({number for watch in self._watches for number in watch.numbers})

    # -- reaping --------------------------------------------------------------------------------

    def rows(self, lines: ServerConnections) -> list[Row]:
        """The owners on the list, in any process."""
        told = lines.call("owners", b"list", b"")
        return [Row(_OWNER.decode(told[i]), int(told[i + 1])) for i in range(0, len(told), 2)]

    def reap(self) -> int:
        """Give back the leases of dead owners; return the number of these owners."""
        with SignalsDeferred():
            if not self._reaping.acquire(blocking=False):
                return 0  # another thread is reaping
            try:
                return self._reap_dead() + self._reap_overdue()
            finally:
                self._reaping.release()

    def _reap_dead(self) -> int:
        """Release owners of this machine whose process is gone; return their number."""
        if self._liveness is None:
            return 0
        self._liveness.keep()
        rows = self.rows(self._brisk)
        live, ours = self._liveness, self._ours()
        dead = [
            row
            for row in rows
            if row.number
            and row.owner.id not in ours
            and row.owner.host == hostname()
            and live.is_here(row.number)
            and not live.alive(row.number)
        ]
        for row in dead:
            self._bury(row.owner, b"%d" % row.number)
        self._sweep(live, {row.number for row in rows} - {row.number for row in dead})
        return len(dead)

    @staticmethod
    def _sweep(live: Liveness, listed: Collection[int]) -> None:
        """Remove the FIFOs of owners that are not on the list and that nobody holds."""
        for name in live.names():
            number, _, kind = name.partition(".")
            if kind == "fifo" and int(number) not in listed and not live.alive(int(number)):
                live.remove(int(number))

    def _reap_overdue(self) -> int:
        """Release owners of any machine whose lease is over; return their number."""
        overdue = self._brisk.call("owners", b"overdue", b"")
        late = [
            (_OWNER.decode(overdue[i + 1]), overdue[i + 2] / MICRO)
            for i in range(0, len(overdue), 3)
            # Skip owners of this process: they renew their leases themselves.
            if overdue[i].decode() not in self._ours()
        ]
        if not late or not self._trusts():
            return 0
        dead = {owner.id for owner, _ in late}
        hosts = {row.owner.host for row in self.rows(self._brisk) if row.owner.id not in dead}
        mine = [
            owner
            for owner, seconds in late
            if owner.host == hostname() or seconds >= PRECEDENCE or owner.host not in hosts
        ]
        for owner in mine:
            self._bury(owner, b"dead")
        return len(mine)

    def _bury(self, owner: Owner, only: bytes) -> None:
        """Give back a dead owner's leases, by its scoreboard if this machine has the scoreboard."""
        here = owner.host == hostname()
        running = read_scoreboard(owner.board, owner.id) if here and owner.board else None
        if here and owner.kind == "consumer" and only != b"dead":
            # A consumer runs all jobs that it holds.
            running = self._brisk.call("owners", b"tokens", owner.id.encode())
        causes = None
        if running is not None:
            died = "died" if owner.kind == "consumer" else "died with its processes"
            causes = dict.fromkeys(map(int, running), f"{owner.kind} {owner.name} {died}")
        release(self._brisk, owner.id, causes, only)
        if here and owner.board:
            remove_scoreboard(owner.board, owner.id)

    def close(self) -> None:
        """Close all FIFOs of this process, and watch no owner."""
        for watch in list(self._watches):
            self.end(watch)

    def after_fork_child(self) -> None:
        """In a forked child: close the copies of FIFOs, or a dead parent would seem alive."""
        if self._liveness is not None:
            self._liveness.after_fork_child()
        self._liveness, self._watches = None, []


def release(
    lines: ServerConnections, owner_id: str, causes: Mapping[int, str] | None, only: bytes = b""
) -> int:
    """Take an owner off the list, and log its failed jobs; return the number of its leases."""
    held = lines.ask(b"HVALS", lines.key + b":l:" + owner_id.encode()) if causes is None else []
    many = int(lines.call("owners", *release_args(owner_id, causes, only), once=True))
    if held and many:
        ids = [job_id.decode() for job_id in held[:MOST_LOOKED_AT]]
        log_failed(Inspection(lines).get(ids))
    return many


def release_args(
    owner_id: str, causes: Mapping[int, str] | None, only: bytes = b""
) -> Sequence[bytes]:
    """The arguments of a release; ``only`` is the condition that the store checks first."""
    account: list[bytes] = []
    for token, cause in (causes or {}).items():
        account += (b"%d" % token, cause.encode())
    kind = b"lost" if causes is None else b""
    return b"release", owner_id.encode(), kind, only, *account


def folder_here() -> str:
    """The folder of all owners of this user on this machine, for all Redis stores."""
    folder = os.path.join(private_folder(), "redis")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def hostname() -> str:
    """The name of this machine, as in the records of owners."""
    return socket.gethostname()
