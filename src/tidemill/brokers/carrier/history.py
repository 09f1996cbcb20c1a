"""The calls for history that a carrying broker passes on to its store."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.carrier.lending import LendingStore
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import HistoryRow


class HistoryCalls:
    """Passes calls on to the store. The steps of workers bring their rows to the store, too."""

    store: LendingStore

    def history(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        return with_history(self.store, "history").history(kind, span, since, until, name)

    def history_kinds(self) -> list[tuple[str, int]]:
        return with_history(self.store, "history_kinds").history_kinds()

    def keep_history(self, rows: Sequence[HistoryRow]) -> None:
        with_history(self.store, "keep_history").keep_history(rows)
