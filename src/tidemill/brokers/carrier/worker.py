"""A worker behind a carrier: it takes from the store the leases that the carrier brings."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import msgspec

from tidemill.brokers.carrier.relay import (
    Brought,
    Carrier,
    InvalidMessage,
    Relay,
    unwrap,
)
from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.crash_points import point
from tidemill.core.job import Outcome, Verdict
from tidemill.core.owner import Command, Owner

_KEPT = 10.0
"""Seconds after which the message of a running job is acknowledged. Until then, the server sends no
other message to the busy worker. Without the acknowledgement, the server would take the message
back after some minutes."""


class CarriedWorker:
    """A worker as an owner: it holds messages of the carrier until it takes their leases."""

    def __init__(self, store: Store, carrier: Carrier, owner: Owner) -> None:
        self._store = store
        self._carrier = carrier
        self._id = owner.id
        self._brought: list[Brought] = []
        self._kept: dict[int, tuple[int, float]] = {}
        """Token of a lease -> token of its message, and machine time at which the lease was taken.
        The oldest lease comes first."""
        self._look = 0  # the number of the last check that the relay was asked for
        self._did = True  # True when the worker was active since its last request for a check
        with contextlib.ExitStack() as undoing:
            carrier.attach(owner)
            undoing.callback(carrier.detach, owner.id)
            store.attach(owner)
            undoing.callback(store.detach, owner.id)
            self.relay = Relay(store, carrier, owner)
            undoing.pop_all()

    def exchange(self, step: Step) -> Reply:
        """Exchange with the store, and take the leases that the carrier brought."""
        more = self._fetch(step, self._done_with(step))
        if self._brought:
            point("carried.brought")
        take = [(one.lease.token, one.id) for one in self._brought]
        want = self._not_carried(step)
        reply = self._store.exchange(msgspec.structs.replace(step, want=want, take=take))
        brought, self._brought = self._brought, []
        lost = len(reply.taken) < len(brought)  # the owner was given up, and took no lease
        taken = [False] * len(brought) if lost else reply.taken
        now, since = clock.wall(), clock.machine()
        for one, mine in zip(brought, taken, strict=True):
            if mine:
                self.relay.came(one)
                one.lease.leased = now
                reply.leases.append(one.lease)
                self._kept[one.lease.token] = one.token, since
        if not all(taken):
            reply.next_due, more = 0.0, True  # a message was stale: ask for another one
        if brought:
            point("carried.taken")
        outcome = Outcome.RELEASE if lost else Outcome.SUCCESS
        not_taken = (one for one, mine in zip(brought, taken, strict=True) if not mine)
        self._end([Verdict(one.token, outcome) for one in not_taken])
        if step.verdicts or reply.leases:
            self._did = True
        elif self._did and step.want is not None:
            # Without the check of ``_did``, every job would wake the relay.
            self._did, self._look = False, self.relay.ask()
        reply.more = more or self._did or not self.relay.has_looked(self._look)
        if self.relay.quiet and step.want is not None and step.want.count:
            # The store has not seen this want, and so has not sent this command.
            reply.commands.append(Command("quiet"))
        return reply

    def _done_with(self, step: Step) -> list[Verdict]:
        """Verdicts on messages whose jobs have ended, or have run for ``_KEPT`` seconds."""
        kept, late = self._kept, clock.machine() - _KEPT
        tokens = [one.token for one in step.verdicts if one.token in kept and not one.hold]
        tokens += itertools.takewhile(lambda token: kept[token][1] < late, kept)
        return [Verdict(kept.pop(token)[0], Outcome.SUCCESS) for token in dict.fromkeys(tokens)]

    def _fetch(self, step: Step, ends: list[Verdict]) -> bool:
        """Receive wanted messages; True when more may be on their way."""
        want = step.want
        if want is None or not want.tasks:
            self._end(ends)
            return False
        alone = want.alone and not any(one.lease.losses for one in self._brought)
        missing = max(0, want.count - len(self._brought))
        want = msgspec.structs.replace(want, count=missing, alone=alone, messages=False)
        reply = self._carrier.exchange(Step(self._id, ends, want))
        for found in reply.leases:
            try:
                self._brought.append(unwrap(found))
            except InvalidMessage as error:
                self._end([Verdict(found.token, Outcome.FAIL, error=str(error))])
        return reply.more

    def _not_carried(self, step: Step) -> Want | None:
        """The part of the want for the store itself: messages, and jobs set aside."""
        want = step.want
        if want is None or not (want.messages or want.told >= 0 or want.knows):
            return None
        missing = max(0, want.count - len(self._brought))
        return msgspec.structs.replace(want, count=missing, tasks=False, alone=False)

    def _end(self, verdicts: list[Verdict]) -> None:
        if verdicts:
            self._carrier.exchange(Step(self._id, verdicts))

    def wait(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep until the carrier brings a message or the store has a hint."""
        wake_up = self._carrier.wake_up_fd(self._id)
        if not self._carrier.arm(self._id):
            timeout = 0.0
        try:
            ready = self._store.wait(self._id, timeout, [wake_up, *fds])
        finally:
            self._carrier.disarm(self._id)
        return [fd for fd in ready if fd != wake_up]

    def detach(self) -> None:
        """Leave the carrier and the store; messages that were not taken go to other workers."""
        with contextlib.ExitStack() as leaving:  # do every step, also when another step fails
            leaving.callback(self._store.detach, self._id)
            leaving.callback(self.leave)

    def leave(self) -> None:
        """Leave the carrier, and stop the relay."""
        with contextlib.ExitStack() as leaving:
            leaving.callback(self._carrier.detach, self._id)
            leaving.callback(self._let_go)
            leaving.callback(self.relay.stop)

    def _let_go(self) -> None:
        ends = [Verdict(one.token, Outcome.RELEASE) for one in self._brought]
        ends += [Verdict(token, Outcome.SUCCESS) for token, _ in self._kept.values()]
        self._end(ends)
