"""Receipts that this server has settled, so that a repeated request is told from a lost lease.

A client repeats its request when the answer to the first was lost. The store has forgotten the
message by then. The latest receipts are kept in memory: a server that was started anew, or another
server, answers a repetition as it answers a lost lease.
"""

from __future__ import annotations

from collections import OrderedDict

from tidemill.job import Outcome
from tidemill.server.receipts import Receipt

__all__ = ["Settled"]

KEPT = 100_000
"""Receipts that are kept, the latest."""


class Settled:
    """The outcome of each of the latest receipts."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[Receipt, Outcome] = OrderedDict()

    def add(self, receipt: Receipt, outcome: int) -> None:
        """A message was settled with this receipt."""
        self._outcomes[receipt] = Outcome(outcome)
        if len(self._outcomes) > KEPT:
            self._outcomes.popitem(last=False)

    def outcome(self, receipt: Receipt) -> Outcome | None:
        """How its message was settled; None when that is not known, or it was not."""
        return self._outcomes.get(receipt)
