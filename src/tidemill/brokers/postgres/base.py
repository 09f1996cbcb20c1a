"""The state of a broker in this process, and its session with the server."""

from __future__ import annotations

import os

from tidemill.brokers.postgres.history import HistoryTable
from tidemill.brokers.postgres.owners import Owners
from tidemill.brokers.postgres.settings import Address
from tidemill.brokers.postgres.statements import Session
from tidemill.brokers.postgres.waits import Waits
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.core.errors import TidemillError


class ServerCalls:
    """The base of all calls of the broker."""

    def __init__(self, address: Address) -> None:
        self.url = address.shown
        self._address = address
        self._closed = False
        self._enter()
        tell_of_forks(self)

    def _enter(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        self._pid = os.getpid()
        self._next_tick = 0.0
        self._session = Session(self._address, self._heard, self._back)
        self._owners = Owners(self._session)
        self.waits = Waits(self._session)
        self._history = HistoryTable(self._session)

    def _heard(self, word: str) -> None:
        if not word[0].isdecimal():
            self.waits.heard()
        self._owners.heard(word)

    def _back(self) -> None:
        """Wake all sleepers, since notifications were lost while the connection was broken."""
        self._owners.back()
        self.waits.heard()

    def after_fork_child(self) -> None:
        """Leave connections, owners and sleepers to the parent, in a forked child."""
        if not self._closed:
            self._session.after_fork_child()
            self._owners.after_fork_child()
            self.waits.after_fork_child()

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        if self._pid != os.getpid():
            self._enter()

    def close(self) -> None:
        if not self._closed and self._pid == os.getpid():
            self._owners.leave()
            self._session.close()
        self._closed = True
