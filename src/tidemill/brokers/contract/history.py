"""The part of the contract for history: rows of numbers by period (:mod:`.history_rows`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.history_rows import HistoryRow


class History(Protocol):
    """Reading rows, and replacing rows. ``Step.history`` adds to rows."""

    def history(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        """The rows of a kind and span with ``since <= at < until``, by ``at`` and name.

        ``name`` keeps only the rows of this name; empty for all names.
        """
        ...

    def history_kinds(self) -> list[tuple[str, int]]:
        """The kinds and spans that have rows, in order."""
        ...

    def keep_history(self, rows: Sequence[HistoryRow]) -> None:
        """Replace rows. A row without counts and without a sample is deleted.

        The call also works while the store's jobs move to another store.
        """
        ...


def with_history(broker: Broker, option: str) -> History:
    """The broker with its calls for history. Raises FeatureMissing, which names ``option``."""
    need(broker, Feature.HISTORY, option)
    return cast(History, broker)
