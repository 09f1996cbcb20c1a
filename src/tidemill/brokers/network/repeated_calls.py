"""Repeat the exchanges of an owner whose connection may break during any of them.

Every step has a serial, which the store keeps together with its reply. After a lost reply the step
is sent again under its serial, before the next step. The store answers the step again, but does not
repeat its effects. Leases of this answer are given to the owner with the next reply.

The caller of the broken step got ``BrokerUnavailable``. Its next step has the same verdicts, and
begins with the same notes. Its next history begins with the same rows. This module does not send
these parts again, and answers the verdicts from the first reply. The reply after a broken step is
``behind``: the server that answers may have lost steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.core.job import Note, Verdict
from tidemill.core.locks import LongLock
from tidemill.core.signals import raised_by_handler
from tidemill.errors import BrokerUnavailable

_Name = tuple[int, bool]
_Part = TypeVar("_Part")


def _name(verdict: Verdict) -> _Name:
    """The key of a verdict. A lease gets one verdict, or two: the first with ``hold``."""
    return verdict.token, verdict.hold


def _without(parts: Sequence[_Part], known: list[_Part]) -> Sequence[_Part]:
    """The parts of a step after the known parts, if it begins with these."""
    return parts[len(known) :] if list(parts[: len(known)]) == known else parts


class RepeatedCalls:
    """The exchanges of one owner, one at a time, from any thread.

    ``send`` carries a step with its serial to the store. It raises ``BrokerUnavailable`` when the
    step may have happened or may happen later, and any other error when it did not happen. The
    first serial is ``serial`` + 1.
    """

    def __init__(self, send: Callable[[Step, int], Reply], serial: int = 0) -> None:
        self.serial = serial  # the serial of the latest step
        self._send = send
        self._lock = LongLock()
        self._broken: Step | None = None  # the step that was sent and not answered
        self._settled: dict[_Name, bool] = {}  # answers to the verdicts of broken steps
        self._noted: list[Note] = []  # the notes of broken steps, which the store has
        self._counted: list[HistoryRow] = []  # the history of broken steps, which the store has
        self._unread: Reply = Reply()  # replies to broken steps, not yet handed on

    def exchange(self, step: Step) -> Reply:
        """Send one step. After ``BrokerUnavailable`` the next call repeats the broken step."""
        with self._lock:
            if self._broken is not None:
                self._repeat(self._broken)
            return self._send_rest(step)

    def _repeat(self, broken: Step) -> None:
        reply = self._send_one(broken)
        told = zip(broken.verdicts, reply.settled, strict=True)
        self._settled |= {_name(verdict): settled for verdict, settled in told}
        self._noted += broken.notes
        self._counted += broken.history
        self._unread.leases += reply.leases
        self._unread.commands += reply.commands
        self._unread.behind = True

    def _send_rest(self, step: Step) -> Reply:
        over = self._unread
        heard = self._settled or self._noted or self._counted or over.leases
        fresh = self._without_known(step) if heard else step
        if step.held is not None and heard:
            fresh.held = [*step.held, *(lease.token for lease in over.leases)]
        reply = self._send_one(fresh)
        if fresh is not step:
            new = iter(reply.settled)
            reply.settled = [
                self._settled[_name(v)] if _name(v) in self._settled else next(new)
                for v in step.verdicts
            ]
            self._settled, self._noted = {}, []
            self._counted = [] if step.history else self._counted
        if over.behind:
            reply.leases = over.leases + reply.leases
            reply.commands = over.commands + reply.commands
            reply.behind = True
            self._unread = Reply()
        return reply

    def _without_known(self, step: Step) -> Step:
        """The step without the parts that the store has; it wants only the leases still missing."""
        want = step.want
        if want is not None and self._unread.leases:
            left = max(0, want.count - len(self._unread.leases))
            want = msgspec.structs.replace(want, count=left)
        return msgspec.structs.replace(
            step,
            verdicts=[v for v in step.verdicts if _name(v) not in self._settled],
            notes=_without(step.notes, self._noted),
            history=_without(step.history, self._counted),
            want=want,
        )

    def _send_one(self, step: Step) -> Reply:
        """Send a step under the next serial; a repeated step keeps its serial."""
        if self._broken is None:
            self.serial += 1
        self._broken = step
        try:
            reply = self._send(step, self.serial)
        except BrokerUnavailable:
            raise
        except Exception as error:
            if not raised_by_handler(error):  # a handler may have interrupted a sent step
                self._broken = None
            raise
        self._broken = None
        return reply
