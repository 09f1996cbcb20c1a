"""History through the server: read and replace rows."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.history_rows import HistoryRow
from tidemill.brokers.http.server_calls import ServerCalls


class History(ServerCalls):
    """The calls of the contract for history. An older server, or its store, may lack them."""

    features: frozenset[Feature]

    def history(
        self, kind: str, span: int, since: int = 0, until: int = 1 << 40, name: str = ""
    ) -> list[HistoryRow]:
        self._check_feature("history")
        rows: list[HistoryRow] = self._call(
            "history", kind=kind, span=span, since=since, until=until, name=name
        )
        return rows

    def history_kinds(self) -> list[tuple[str, int]]:
        self._check_feature("history_kinds")
        kinds: list[tuple[str, int]] = self._call("history_kinds")
        return kinds

    def keep_history(self, rows: Sequence[HistoryRow]) -> None:
        self._check_feature("keep_history")
        self._call("keep_history", rows=rows)

    def _check_feature(self, call: str) -> None:
        if Feature.HISTORY not in self.features:
            raise lacks(self.url, Feature.HISTORY, call)
