"""An owner attached in this process: its steps, its hand-off, its sleep."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.postgres.exchange import send
from tidemill.brokers.postgres.handoff import HandOff
from tidemill.brokers.shared import owners as shared
from tidemill.brokers.shared.owners import Ended
from tidemill.brokers.shared.waits import Until
from tidemill.core.job import Owner

if TYPE_CHECKING:
    from tidemill.brokers.postgres.statements import Session


class AttachedOwner(shared.ConnectedOwner):
    """An owner whose calls this process makes."""

    def __init__(self, session: Session, owner: Owner, number: int) -> None:
        super().__init__(owner, number)
        self._session = session
        self.hand_off = HandOff()
        self.partial = False  # True when the last step took some jobs, but fewer than wanted
        self.hears = False  # this process gets the notifications of a remote owner
        self._turn = 0

    def send(self, step: Step, serial: int) -> Reply:
        return send(self._session, self, step, serial)

    def goes_on(self, owner: Owner) -> None:
        super().goes_on(owner)
        self._turn = 0

    def turned(self, turn: int) -> None:
        """Store the turn of an answered step. Turns count the owner's steps in all processes."""
        if self._turn and turn != self._turn + 1:  # another process has made a step
            self.hears = False
        self._turn = turn

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], Ended]:
        session = self._session
        self.hand_off.waits()
        if self.partial:
            self.partial, timeout = False, 0.0
        lease = self.owner.lease or session.address.owner_lease
        left = lease / 3 - (time.monotonic() - self.renewed)
        return (yield from super().parked(min(timeout, left, session.longest_sleep()), fds))
