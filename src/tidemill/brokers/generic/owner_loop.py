"""The loop of an owner: collect, exchange, hand out, sleep.

The supervisor of a worker and the clients of a job server are owners. Each has a subclass of
:class:`OwnerLoop`. What all of them do with a store that is away, or that gave them up, is here.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections.abc import Callable, Sequence

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Reply, Step, is_lost
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable, StoreFull, TidemillError

log = logging.getLogger("tidemill")

UNTAKEN = (BrokerUnavailable, StoreFull, OSError)  # the store is away or full: repeat

Sleep = Callable[[Sequence[int], float], Sequence[int]]
"""Sleeps for some seconds, or until a descriptor is readable; returns the readable descriptors."""

RETRY = 1.0  # seconds from an error of the store to the next step, unless something wakes the loop


def poll(fds: Sequence[int], timeout: float) -> list[int]:
    """Sleep until a descriptor is readable; return the readable descriptors."""
    sleeper = select.poll()
    for fd in fds:
        sleeper.register(fd, select.POLLIN)
    return [fd for fd, _ in sleeper.poll(timeout * 1000)]


class OwnerLoop:
    """One owner and its store. One thread makes the turns; any thread may call :meth:`wake`."""

    def __init__(self, broker: Broker, owner: Owner, poll: Sleep = poll) -> None:
        self.asleep = False
        self._broker = broker
        self._owner = owner
        self._poll = poll
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._is_away = False  # True when the latest log line says that the store is away

    # -- what a subclass says and does ------------------------------------------------------------

    def collect(self) -> Step:
        """The next step."""
        raise NotImplementedError

    def exchange(self, step: Step) -> Reply:
        return self._broker.exchange(step)

    def hand_out(self, step: Step, reply: Reply) -> float:
        """Hand out the reply; return the seconds until the next step is due."""
        raise NotImplementedError

    def failed(self, error: Exception) -> float:
        """Keep for the next step what the store has not taken; return the seconds until then.

        Raises:
            Exception: the error ends the loop.
        """
        raise NotImplementedError

    def lost(self) -> None:
        """The store gave this owner up: drop its leases."""

    def has_news(self) -> bool:
        """True when the next step must not wait. :meth:`wake` follows news from other threads."""
        raise NotImplementedError

    # -- the loop ---------------------------------------------------------------------------------

    def turn(self) -> None:
        """Make a step, and sleep until the next step is due."""
        self.sleep(*self.step())

    def step(self) -> tuple[Sleep, float]:
        """Make a step; return how the loop sleeps after the step, and for how many seconds."""
        try:
            step = self.collect()
            reply = self.exchange(step)
            if self._is_away:
                self._is_away = False
                log.info("the broker is back")
            seconds = self.hand_out(step, reply)
            if is_lost(reply):
                self.begin_anew()
            return self._wait, seconds
        except Exception as error:
            return self._poll, self.failed(error)

    def wake(self) -> None:
        """End the sleep of the loop. Call this after :meth:`has_news` has become true."""
        if self.asleep:
            self.asleep = False  # one ring is enough
            with contextlib.suppress(OSError):
                self._ringer.send(b"x")

    def free(self) -> None:
        """Close the descriptors. Nobody may make a turn any more."""
        self._bell.close()
        self._ringer.close()

    def say_away(self, error: Exception) -> None:
        """Log once that the store is away, or refuses steps."""
        if not self._is_away:
            self._is_away = True
            is_foreseen = isinstance(error, (TidemillError, OSError))
            log.error("%s; trying again", error, exc_info=not is_foreseen)

    def begin_anew(self) -> None:
        """Attach again: the store has given the leases to other owners."""
        log.warning("the broker gave %s up: others have its jobs; it begins anew", self._owner.name)
        self.lost()
        # If this fails, the next exchange brings the command ``lost`` again.
        with contextlib.suppress(*UNTAKEN):
            self._broker.attach(self._owner)

    def _wait(self, fds: Sequence[int], seconds: float) -> Sequence[int]:
        try:
            return self._broker.wait(self._owner.id, seconds, fds)
        except Exception as error:
            return self._poll(fds, self.failed(error))

    def sleep(self, how: Sleep, seconds: float) -> None:
        """Sleep until the time is over, or until news come."""
        # No ring is missed: the loop is asleep before it looks for news.
        self.asleep = True
        try:
            if not self.has_news() and how([self._bell.fileno()], seconds):
                self._bell.recv(4096)
        finally:
            self.asleep = False
