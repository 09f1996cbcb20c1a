"""The leases of a worker, and the verdicts that the store has lately taken.

A store may lose its latest steps: a replica that lags takes over, or a backup is restored. The
store then counts jobs as running that this worker has settled or never had: *strays*. The worker
asks for the strays and settles each again with its remembered verdict. A stray without a remembered
verdict goes back to its queue, and no attempt counts.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Sequence

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.clock import clock
from tidemill.core.job import Lease, Verdict
from tidemill.worker.lost_jobs import unstarted

log = logging.getLogger("tidemill.worker")

KEPT_FOR = 60.0
"""Seconds for which verdicts that the store has taken are remembered."""

KEPT_MOST = 10_000
"""Verdicts remembered at most."""

KEPT_BYTES = 32 * 1024 * 1024
"""Bytes of results remembered at most."""


class HeldLeases:
    """The leases that are not settled. Only the thread that calls the store may use this."""

    def __init__(self) -> None:
        self._open: set[int] = set()  # tokens of leases that are not settled
        self._taken: collections.deque[tuple[float, int, Sequence[Verdict]]] = collections.deque()
        self._count = 0
        self._bytes = 0
        self._behind = False

    def held(self) -> list[int] | None:
        """For ``Step.held``: the tokens of all leases, if the store may have lost steps."""
        return list(self._open) if self._behind else None

    def answered(self, step: Step, reply: Reply) -> list[Verdict]:
        """Evaluate the reply to a step; return verdicts on the strays that the reply names."""
        self.settled(step.verdicts)
        self._behind = reply.behind or (self._behind and step.held is None)
        return self._settle_again(reply.strays) if reply.strays else []

    def lend(self, leases: Iterable[Lease]) -> None:
        """Add these leases."""
        self._open.update([lease.token for lease in leases])

    def settled(self, verdicts: Sequence[Verdict]) -> None:
        """Remember that the store has taken these verdicts."""
        if not verdicts:
            return
        self._open.difference_update([one.token for one in verdicts if not one.hold])
        now = clock.machine()
        size = sum([len(one.result) for one in verdicts])
        self._taken.append((now, size, verdicts))
        self._count += len(verdicts)
        self._bytes += size
        while self._taken and (
            self._count > KEPT_MOST
            or self._bytes > KEPT_BYTES
            or self._taken[0][0] < now - KEPT_FOR
        ):
            _, size, old = self._taken.popleft()
            self._count -= len(old)
            self._bytes -= size

    def forget(self) -> None:
        """Drop all leases: the store has given them to other workers."""
        self._open.clear()
        self._taken.clear()
        self._count = self._bytes = 0
        self._behind = False

    def _settle_again(self, strays: Sequence[int]) -> list[Verdict]:
        wanted, oldest = frozenset(strays), clock.machine() - KEPT_FOR
        again = [
            one
            for at, _, verdicts in self._taken
            if at >= oldest
            for one in verdicts
            if one.token in wanted
        ]
        known = {one.token for one in again}
        back = [unstarted(token) for token in strays if token not in known]
        self._open |= wanted
        log.warning(
            "the store has lost its latest steps: %d verdicts are handed in again, %d jobs go back",
            len(again),
            len(back),
        )
        return again + back
