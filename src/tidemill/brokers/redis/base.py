"""The state of a broker in this process, and its calls to the server."""

from __future__ import annotations

import os
import struct
from typing import Any

from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.failover import Server
from tidemill.brokers.redis.history import HistoryTable
from tidemill.brokers.redis.inspect import Inspection
from tidemill.brokers.redis.limits import Ledger
from tidemill.brokers.redis.open import open_store
from tidemill.brokers.redis.owners import Owners, check_moved
from tidemill.brokers.redis.record import MICRO
from tidemill.brokers.redis.schedules import Book
from tidemill.brokers.redis.settings import Settings
from tidemill.brokers.redis.waits import Waits
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.core.clock import clock
from tidemill.core.errors import TidemillError

_PRUNE_MOST = 250
_RETENTION = struct.Struct(">dddd")


class ServerCalls:
    """The base of all calls of the broker."""

    def __init__(self, settings: Settings) -> None:
        self.url = settings.address.shown
        self._settings = settings
        self._closed = False
        self._next_tick = 0.0
        self._doubtful = False  # True when the store did not know an owner
        self._begin()
        try:
            born, now = open_store(self._lines)
        except BaseException:
            self._lines.close()
            raise
        self._born, self._ahead = born / MICRO, now / MICRO - clock.wall()
        tell_of_forks(self)

    def _begin(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        settings, kept = self._settings, self._settings.retention
        self._pid = os.getpid()
        times = (kept.succeeded * MICRO, kept.count, kept.failed * MICRO, kept.protect * MICRO)
        key = b"{%s}" % settings.prefix.encode()
        server = Server(settings.address, key)
        retention = _RETENTION.pack(*times)
        self._lines = ServerConnections(
            server, key, retention, settings.patience, settings.replicas
        )
        self._brisk = ServerConnections(server, key, retention, 0.0)
        self._owners = Owners(self._lines, self._brisk, settings.owner_lease)
        self.waits = Waits(self._lines)
        self._inspection = Inspection(self._lines)
        self._book = Book(self._lines)
        self._ledger = Ledger(self._lines)
        self._history = HistoryTable(self._lines)

    def after_fork_child(self) -> None:
        """In a forked child: close the copies of the parent's connections and owners."""
        if not self._closed:
            self._owners.after_fork_child()
            self.waits.after_fork_child()
            self._lines.close()
            self._brisk.close()
            known = self._lines.server.nodes
            self._begin()
            self._lines.server.learn(known)

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")

    def _call(self, verb: str, *args: bytes) -> Any:
        """Run a verb once, even if replies are lost; wait for replicas as configured."""
        self._check_open()
        answer = self._lines.call(verb, *args, once=True, replicated=True)
        check_moved(answer)
        return answer

    def _do(self, *args: bytes, function: str = "admin") -> Any:
        """Run an admin call. If the call ends many jobs, later calls end the rest in pieces."""
        answer, more = self._call(function, *args)
        if more:
            self._go_on(self._lines)
        return answer

    def _go_on(self, lines: ServerConnections) -> None:
        """Move due jobs, start their dependents, and prune, in pieces, until nothing is left."""
        while lines.call("housekeeping", b"%d" % _PRUNE_MOST):
            pass

    def close(self) -> None:
        if not self._closed:
            self._owners.leave()
            self.waits.close()
            self._lines.close()
            self._brisk.close()
        self._closed = True
