"""Receipts that this server has settled: they tell a repeated request from a lost lease.

A client repeats its request when the first answer was lost. The store has forgotten the message by
then. This server keeps the latest receipts in memory. After a restart, or on another server, a
repeated request gets the answer for a lost lease.
"""

from __future__ import annotations

from collections import OrderedDict

from tidemill.core.job import Outcome
from tidemill.server.http.receipts import Receipt

KEPT = 100_000
"""The number of latest receipts that are kept."""


class SettledReceipts:
    """The outcome of each of the latest receipts."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[Receipt, Outcome] = OrderedDict()

    def add(self, receipt: Receipt, outcome: int) -> None:
        """Record the outcome with which a receipt settled its job."""
        self._outcomes[receipt] = Outcome(outcome)
        if len(self._outcomes) > KEPT:
            self._outcomes.popitem(last=False)

    def outcome(self, receipt: Receipt) -> Outcome | None:
        """The outcome of a receipt; None when it is unknown or has settled nothing."""
        return self._outcomes.get(receipt)
