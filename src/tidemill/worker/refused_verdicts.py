"""Settle the verdicts of a step that the store refused.

A full store keeps the outcome of a job that succeeded, but no large result. All large results of
the step are dropped at once. Then the verdicts are handed in by parts, and a refusal halves the
size of the parts. So a full store has to refuse only a few parts a second, however many jobs end.
The reason of any other refusal may be a single verdict, which must not hold up the other verdicts.
So each verdict is handed in by itself, and a job whose verdict cannot be stored fails.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from tidemill.brokers.contract.broker import SMALL_RESULT, Broker
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.clock import clock
from tidemill.core.config import storable
from tidemill.core.envelope import RESULT_NOT_KEPT
from tidemill.core.errors import BrokerUnavailable, StoreFull, TidemillError
from tidemill.core.job import Note, Outcome, Verdict

log = logging.getLogger("tidemill.worker")

SAID_FOR = 60.0
"""Seconds between two log lines about a full store, which may have room and be full in turn."""


class Settled(msgspec.Struct):
    """What became of a refused step.

    Attributes:
        reply: the leases and commands of all replies. ``next_due`` is 0 when all verdicts and notes
            are stored, and infinity when some must be offered again.
        verdicts: the verdicts of the step, in order. A verdict that cannot be stored is replaced by
            the failure in its place.
        answers: the answers to these verdicts. None means that the verdict must be offered again.
        notes: notes that must be offered again.
    """

    reply: Reply
    verdicts: list[Verdict] = []
    answers: list[bool | None] = []
    notes: Sequence[Note] = ()

    def put_off(self, verdicts: Sequence[Verdict]) -> None:
        """Have the next step offer these verdicts again."""
        self.verdicts += verdicts
        self.answers += [None] * len(verdicts)
        self.reply.next_due = float("inf")


class RefusedVerdicts:
    """The refused steps of one owner."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._full = False  # True when the latest log line says that the store has no room
        self._full_at = -SAID_FOR  # machine time of the last log line about a full store
        self._lost_at = -SAID_FOR  # machine time of the last log line about lost results
        self._refused_at = -SAID_FOR  # machine time of the last log line about another refusal

    def settle(
        self, broker: Broker, verdicts: Sequence[Verdict], notes: Sequence[Note], error: Exception
    ) -> Settled:
        """Hand in the verdicts and notes of a step that was refused with ``error``."""
        done = Settled(Reply(next_due=0.0 if verdicts or notes else float("inf")))
        if not isinstance(error, StoreFull) and clock.machine() - self._refused_at >= SAID_FOR:
            self._refused_at = clock.machine()
            log.error("the store refused a step: %s; its verdicts are handed in one by one", error)
        if notes:
            self._store_notes(broker, notes, done)
        if isinstance(error, StoreFull):
            self._settle_in_parts(broker, verdicts, error, done)
        else:
            self._settle_one_by_one(broker, verdicts, done)
        return done

    def _store_notes(self, broker: Broker, notes: Sequence[Note], done: Settled) -> None:
        """Store the notes of running jobs by themselves, before any of these jobs is settled."""
        try:
            self._hand_in(broker, Step(self._owner, notes=notes), done)
        except (BrokerUnavailable, StoreFull, OSError):
            done.notes = notes
            done.put_off([])
        except Exception as error:
            log.error("progress and log lines of jobs cannot be stored, and are lost: %s", error)

    def say_full(self, error: StoreFull) -> None:
        """Log once that the store has no room."""
        if not self._full and clock.machine() - self._full_at >= SAID_FOR:
            self._full, self._full_at = True, clock.machine()
            log.error("%s; the worker keeps the outcome of ended jobs until there is room", error)

    def say_room(self) -> None:
        """Log that the store has room again, if an earlier line said that it has none."""
        if self._full:
            self._full = False
            log.info("the store has room again")

    # -- a store without room -------------------------------------------------------------------

    def _settle_in_parts(
        self, broker: Broker, verdicts: Sequence[Verdict], error: StoreFull, done: Settled
    ) -> None:
        self._drop_results(verdicts, error)
        left, size = verdicts, len(verdicts)
        while left and size:
            try:
                self._exchange(broker, left[:size], done)
            except (BrokerUnavailable, OSError):
                break
            except StoreFull:
                size //= 2
                continue
            except Exception:
                self._settle_one_by_one(broker, left[:size], done)
            left = left[size:]
        if left or not verdicts:
            done.put_off(left)
            self.say_full(error)

    def _drop_results(self, verdicts: Sequence[Verdict], error: StoreFull) -> None:
        large = [verdict for verdict in verdicts if len(verdict.result) > SMALL_RESULT]
        for verdict in large:
            verdict.result = RESULT_NOT_KEPT
        if large and clock.machine() - self._lost_at >= SAID_FOR:
            self._lost_at = clock.machine()
            log.error("%s; until then large results are not kept", error)

    # -- one by one -----------------------------------------------------------------------------

    def _settle_one_by_one(
        self, broker: Broker, verdicts: Sequence[Verdict], done: Settled
    ) -> None:
        for verdict in verdicts:
            try:
                self._exchange(broker, [verdict], done)
            except (BrokerUnavailable, StoreFull, OSError):
                done.put_off([verdict])
            except Exception as error:
                self._fail(broker, verdict, error, done)

    def _fail(self, broker: Broker, verdict: Verdict, error: Exception, done: Settled) -> None:
        reason = storable(f"the outcome of the job could not be stored: {error}")[:2000]
        log.error("a verdict cannot be stored; its job fails", exc_info=error)
        failure = Verdict(verdict.token, Outcome.FAIL, error=reason)
        try:
            self._exchange(broker, [failure], done)
        except (TidemillError, OSError):
            done.put_off([verdict])

    def _exchange(self, broker: Broker, verdicts: Sequence[Verdict], done: Settled) -> None:
        done.answers += self._hand_in(broker, Step(self._owner, verdicts), done)
        done.verdicts += verdicts

    @staticmethod
    def _hand_in(broker: Broker, step: Step, done: Settled) -> list[bool]:
        answer = broker.exchange(step)
        done.reply.leases += answer.leases
        done.reply.commands += answer.commands
        return answer.settled
