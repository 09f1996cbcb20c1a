"""The end of a lease inside the caller's own transaction (``Feature.TRANSACTIONS``).

A put inside such a transaction is a call of the :class:`.broker.Broker` with ``txn``.
"""

from __future__ import annotations

from typing import Any, Protocol

from tidemill.core.job import Verdict


class CallerTransactions(Protocol):
    """A broker whose leases can end in a transaction of the caller."""

    def settle_inside(self, owner_id: str, verdict: Verdict, txn: Any) -> bool:
        """End a lease if and only if the caller's transaction commits.

        False when the lease was lost: nothing changed, and the caller should roll back. The verdict
        has no followers.

        Raises:
            InvalidOption: ``txn`` is no open transaction of this store.
        """
        ...
