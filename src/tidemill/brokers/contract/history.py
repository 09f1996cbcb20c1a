"""The part of the contract for history: rows of numbers by period (:mod:`.history_rows`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, cast

import msgspec

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.history_rows import HistoryRow


class NotedAct(msgspec.Struct, frozen=True):
    """An act on jobs. The commit of the act also replaces a note of the dashboard.

    Attributes:
        verb: a call of :class:`~.admin.Admin`; ``terminate`` is ``cancel`` with ``terminate``.
        job_ids: the jobs; at most ``MOST_NOTED``.
        rank, queue: the new rank and queue, for ``alter``.
    """

    verb: Literal["cancel", "terminate", "kick", "delete", "alter"]
    job_ids: list[str]
    rank: int | None = None
    queue: str | None = None


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

    def replace_note(self, before: HistoryRow, rows: Sequence[HistoryRow]) -> bool:
        """Replace notes, as ``keep_history`` does, if the store has exactly the note ``before``.

        Otherwise nothing is changed, and the answer is False. If several writers have read the same
        note, only the first writer can replace the note.
        """
        ...

    def act_noted(self, act: NotedAct, before: HistoryRow, after: HistoryRow) -> list[bool] | None:
        """Act on jobs and replace the note ``before`` by ``after``, in one commit.

        If the store has another note or none, nothing is changed, and the answer is None. ``after``
        has the kind, span, time and name of ``before``, and a sample.

        The answer says for each job whether the act changed the job. For a job that has the rank
        and the queue already, the answer is False, unlike the answer of ``alter``.
        """
        ...


def with_history(broker: Broker, option: str) -> History:
    """The broker with its calls for history.

    Raises:
        FeatureMissing: the broker keeps no history; the error names ``option``.
    """
    need(broker, Feature.HISTORY, option)
    return cast(History, broker)
