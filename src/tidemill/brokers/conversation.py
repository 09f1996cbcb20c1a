"""The exchanges of one owner over a line that may break in the middle of any of them.

Every step has a serial, which the store keeps with what it answered. A step whose reply was lost is
sent again under its serial before the next one, and answered, not done again; what it leased is
handed out with the next reply. Its caller was told ``BrokerUnavailable`` and hands in the same
verdicts, notes and leases to take once more: those are answered from the first reply, and not sent
again. The reply after a broken step is ``behind``: perhaps another server answers, which has less.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidemill.brokers.base import Reply, Step
from tidemill.deferral import raised_by_handler
from tidemill.errors import BrokerUnavailable
from tidemill.job import Verdict
from tidemill.locks import LongLock

__all__ = ["Conversation"]


_Name = tuple[int, bool]


def _name(verdict: Verdict) -> _Name:
    """What tells verdicts apart: a lease gets one, or one that holds it and one that does not."""
    return verdict.token, verdict.hold


class Conversation:
    """One owner's exchanges, one after the other, from any thread.

    ``send`` carries a step with its serial to the store. It raises ``BrokerUnavailable`` when the
    step may have happened or may happen later, and any other error when it did not. Serials begin
    behind ``serial``.
    """

    def __init__(self, send: Callable[[Step, int], Reply], serial: int = 0) -> None:
        self.serial = serial  # the last one given
        self._send = send
        self._lock = LongLock()
        self._broken: Step | None = None  # sent, and not answered
        self._told: dict[_Name, bool] = {}  # what the verdicts of broken steps came to
        self._taken: dict[tuple[int, str], bool] = {}  # and what they wanted to take
        self._noted: list[object] = []
        self._over: Reply = Reply()  # answered, and not handed on

    def exchange(self, step: Step) -> Reply:
        """One step. After ``BrokerUnavailable`` the next call makes good for it."""
        with self._lock:
            if self._broken is not None:
                self._mend(self._broken)
            return self._go_on(step)

    def _mend(self, broken: Step) -> None:
        reply = self._send_one(broken)
        told = zip(broken.verdicts, reply.settled, strict=True)
        self._told |= {_name(verdict): settled for verdict, settled in told}
        self._taken |= dict(zip(broken.take, reply.taken, strict=False))  # none when it is lost
        self._noted += broken.notes
        self._over.leases += reply.leases
        self._over.commands += reply.commands
        self._over.behind = True

    def _go_on(self, step: Step) -> Reply:
        over = self._over
        heard = self._told or self._noted or self._taken or over.leases
        fresh = self._without_known(step) if heard else step
        if step.held is not None and heard:
            lent = [*[lease.token for lease in over.leases], *[token for token, _ in step.take]]
            fresh.held = [*step.held, *lent]
        reply = self._send_one(fresh)
        if fresh is not step:
            new = iter(reply.settled)
            reply.settled = [
                self._told[_name(v)] if _name(v) in self._told else next(new) for v in step.verdicts
            ]
            if len(reply.taken) == len(fresh.take):  # else it is lost
                known, later = frozenset(self._taken), iter(reply.taken)
                reply.taken = [  # one that is named twice is given once
                    self._taken.pop(lease, False) if lease in known else next(later)
                    for lease in step.take
                ]
            self._told, self._noted, self._taken = {}, [], {}
        if over.behind:
            reply.leases = over.leases + reply.leases
            reply.commands = over.commands + reply.commands
            reply.behind = True
            self._over = Reply()
        return reply

    def _without_known(self, step: Step) -> Step:
        """The step without what the store has heard, wanting only what is still missing."""
        noted = len(self._noted) if list(step.notes[: len(self._noted)]) == self._noted else 0
        want = step.want
        if want is not None and self._over.leases:
            left = max(0, want.count - len(self._over.leases))
            want = msgspec.structs.replace(want, count=left)
        return msgspec.structs.replace(
            step,
            verdicts=[v for v in step.verdicts if _name(v) not in self._told],
            notes=step.notes[noted:],
            take=[lease for lease in step.take if lease not in self._taken],
            want=want,
        )

    def _send_one(self, step: Step) -> Reply:
        """Send a step under the next serial, or again under its own."""
        if self._broken is None:
            self.serial += 1
        self._broken = step
        try:
            reply = self._send(step, self.serial)
        except BrokerUnavailable:
            raise
        except Exception as error:
            if not raised_by_handler(error):  # else nobody knows whether it happened
                self._broken = None
            raise
        self._broken = None
        return reply
