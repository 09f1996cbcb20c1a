"""Jobs that a put leased to a sleeping owner of this process: see ``sql/25_handoff.sql``.

The notification contains the lease and the turn of the owner's last step before the put. It is
valid only until the owner's next step begins, since that step brings the same lease again.
"""

from __future__ import annotations

import binascii
import time

from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.postgres.encoding import leases_of
from tidemill.core.job import Lease
from tidemill.core.locks import Lock


class HandOff:
    """The leases that puts made for one owner, and that the owner has not confirmed yet."""

    def __init__(self) -> None:
        self.told: list[int] = []  # tokens that the next step confirms
        self._lock = Lock()
        self._turn = 0  # turn of the last step; 0 until the step is answered
        self._arrived: list[tuple[int, str]] = []  # turn, lease
        self._asked: Want | None = None
        self._due = 0.0  # monotonic time at which the next job comes due
        self.has_waited = False  # the owner waits between its steps, as workers do

    def arrived(self, turn: int, packed: str) -> None:
        """Keep a lease that a notification brought."""
        with self._lock:
            self._arrived.append((turn, packed))

    def may_come(self, want: Want) -> bool:
        """Whether puts may lease jobs to the owner while it sleeps after this step."""
        return self.has_waited and want.sleep and want.tasks and not want.messages

    def take(self, step: Step) -> Reply | None:
        """Answer a step with leases that have arrived; None when the server must be asked."""
        want = step.want
        if want is None or step.verdicts or step.notes or step.touch:
            return None
        if step.history or step.held is not None:
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
        return Reply(leases=leases, next_due=max(0.0, self._due - time.monotonic()))

    def sent(self) -> None:
        """Begin a step at the server: until its answer, no lease from a notification is valid."""
        self._turn = 0

    def answered(self, turn: int, want: Want | None, told: int, due: float) -> None:
        """End a step: drop the ``told`` tokens that the step confirmed."""
        del self.told[:told]
        if want is not None:
            self._asked = want
        self._due = time.monotonic() + due
        with self._lock:
            self._turn = turn
            self._arrived = [each for each in self._arrived if each[0] == turn]


def _alike(want: Want, asked: Want | None) -> bool:
    """True when ``want`` takes the jobs that were leased by the want ``asked``."""
    return asked is not None and (want.queues, want.tasks, want.messages) == (
        asked.queues,
        asked.tasks,
        asked.messages,
    )
