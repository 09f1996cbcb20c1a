"""Renew leases of messages in a thread, for as long as this process holds them.

The thread starts with the first lease. When no lease is left, the thread ends.
"""

from __future__ import annotations

import logging
import os
import threading

from tidemill.client.message import Message
from tidemill.core.errors import TidemillError
from tidemill.core.locks import Condition

log = logging.getLogger("tidemill")

LEASE = 60.0
"""Seconds that a lease lasts after each renewal. When the process stops, the lease runs out."""


class LeaseRenewal:
    """Renews the given leases three times in :data:`LEASE` seconds."""

    def __init__(self, every: float = LEASE / 3) -> None:
        self._every = every
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._changed = Condition()
        self._leases: dict[str, Message] = {}
        self._running = False

    def add(self, message: Message) -> None:
        """Renew the lease of a message from now on."""
        if self._pid != os.getpid():  # a forked child has neither the thread nor the leases
            self._reset()
        with self._changed:
            self._leases[message.id] = message
            if not self._running:
                threading.Thread(target=self._run, name="tidemill-renewal", daemon=True).start()
                self._running = True

    def remove(self, message: Message) -> bool:
        """Stop renewing the lease of a message; False for a lease that was not renewed."""
        with self._changed:
            return self._leases.pop(message.id, None) is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._every)
                messages = list(self._leases.values())
                if not messages:
                    self._running = False
                    return
            for message in messages:
                self._renew(message)

    def _renew(self, message: Message) -> None:
        try:
            renewed = message.touch()
        except TidemillError as error:
            log.warning("%s cannot be renewed now: %s", message, error)
            return
        if not renewed and self.remove(message):
            log.error("%s was lost: its process did not run for %g s", message, LEASE)
