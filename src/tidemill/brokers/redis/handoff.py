"""A task that a put leased to a sleeping owner of this process: see ``lua/handoff.lua``.

The hint contains the lease and the turn of the owner's last step. It is valid only until the
owner's next step begins, since that step brings the same lease again.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.redis.record import read_leases
from tidemill.core.job import Lease


class HandOff:
    """The lease that a put made for one owner, and that no step has confirmed yet."""

    def __init__(self) -> None:
        self.heard = 0  # the turn of the lease that the next step confirms; 0 for none
        self._turn = 0  # of the latest step; 0 when no lease can be valid
        self._asked: Want | None = None
        self.has_waited = False  # the owner waits between its steps, as workers do

    def may_come(self, want: Want) -> bool:
        """Whether puts may lease to the owner while it sleeps after a step with this want."""
        return self.has_waited and want.sleep and want.tasks and not want.messages

    def take(self, step: Step, hints: Sequence[bytes]) -> Lease | None:
        """The lease that a hint brought; None when the server must be asked."""
        want, asked = step.want, self._asked
        if not self._turn or not hints or want is None or not want.count or asked is None:
            return None
        if step.verdicts or step.notes or step.touch or step.history or step.held is not None:
            return None
        if not want.tasks or want.queues != asked.queues:
            return None
        turn = self._turn.to_bytes(8, "big")
        found = [hint for hint in hints if hint.startswith(turn)]
        if not found:
            return None
        self.heard, self._turn = self._turn, 0
        packed = found[0]
        return read_leases((packed[8:60], packed[60:]), ())[0]

    def sent(self) -> None:
        """Begin a step at the server: until its answer, no lease of a hint is valid."""
        self._turn = 0

    def answered(self, turn: int, want: Want | None) -> None:
        """End a step, which has confirmed the lease of the last turn."""
        self.heard, self._turn, self._asked = 0, turn, want
