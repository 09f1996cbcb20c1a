"""Jobs that a put leased to an owner of this process while it slept: see ``sql/25_handoff.sql``.

The lease travels with the notification, so that the owner can begin without asking the server. It
holds only as long as no other step of the owner has begun: that would bring the same lease. Each
names the turn of the step after which it was made, and the reply to a step says which turn it was.
"""

from __future__ import annotations

import binascii
import time

from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.postgres.encoding import leases_of
from tidemill.core.job import Lease
from tidemill.core.locks import Lock

__all__ = ["HandOff"]


class HandOff:
    """What one owner was handed, and has yet to take or to tell that it did."""

    def __init__(self) -> None:
        self.told: list[int] = []  # tokens that the next step says we heard of
        self._lock = Lock()
        self._turn = 0  # of the last step, if that was answered
        self._arrived: list[tuple[int, str]] = []  # turn, lease
        self._asked: Want | None = None
        self._due = 0.0  # monotonic time at which something comes due
        self._waited = False  # since its last step: it is one that comes when it is hinted

    def arrived(self, turn: int, packed: str) -> None:
        """A notification brought a lease."""
        with self._lock:
            self._arrived.append((turn, packed))

    def waits(self) -> None:
        """The owner begins to wait."""
        self._waited = True

    def may_come(self, want: Want) -> bool:
        """Whether a put may lease to the owner while it sleeps, beginning with this step."""
        waited, self._waited = self._waited, False
        return waited and want.sleep and want.tasks and not want.messages

    def take(self, step: Step) -> Reply | None:
        """The answer to a step by what has arrived; None when the server must be asked."""
        want = step.want
        if want is None or step.verdicts or step.notes or step.touch or step.take:
            return None
        with self._lock:
            arrived = [packed for turn, packed in self._arrived if turn == self._turn]
            if not arrived or len(arrived) > want.count or not _alike(want, self._asked):
                return None
            self._arrived = []
        leases: list[Lease] = []
        for packed in arrived:
            leases += leases_of(binascii.a2b_base64(packed))
        self.told += [lease.token for lease in leases]
        self._waited = True  # it has not stepped
        return Reply(leases=leases, next_due=max(0.0, self._due - time.monotonic()))

    def sent(self) -> None:
        """A step goes to the server. Until that is answered nothing holds."""
        self._turn = 0

    def answered(self, turn: int, want: Want | None, told: int, due: float) -> None:
        """It was answered, and the server knows what we had told by then."""
        del self.told[:told]
        if want is not None:
            self._asked = want
        self._due = time.monotonic() + due
        with self._lock:
            self._turn = turn
            self._arrived = [each for each in self._arrived if each[0] == turn]


def _alike(want: Want, asked: Want | None) -> bool:
    """Whether what was leased by the terms of the one is what the other would take."""
    return asked is not None and (want.queues, want.tasks, want.messages) == (
        asked.queues,
        asked.tasks,
        asked.messages,
    )
