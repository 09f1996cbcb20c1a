"""Saved searches: rows of kind ``filter`` in the history of the store, for all users."""

from __future__ import annotations

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HistoryRow
from tidemill.core.clock import clock
from tidemill.core.errors import InvalidOption

_NAME_MOST = 60
_MOST = 100


class SavedFilter(msgspec.Struct, frozen=True):
    """A search with a name."""

    name: str
    query: str
    who: str = ""


def saved_filters(mill: Tidemill) -> list[SavedFilter]:
    """All searches with names, by name; none where the broker keeps no history."""
    if Feature.HISTORY not in mill.broker.features:
        return []
    rows = with_history(mill.broker, "filters").history("filter", ALWAYS)
    return [msgspec.json.decode(row.sample, type=SavedFilter) for row in rows if row.sample]


def save_filter(mill: Tidemill, name: str, query: str, who: str) -> None:
    """Save a search under a name. A search that was saved under this name is replaced.

    Raises:
        InvalidOption: the name is empty or too long, the search is empty, or too many are saved.
        FeatureMissing: the broker keeps no history.
    """
    if not name or len(name) > _NAME_MOST or not name.isprintable():
        raise InvalidOption(f"give the filter a name of 1 to {_NAME_MOST} characters")
    if not query.strip():
        raise InvalidOption("a filter needs a search; an empty search shows all jobs")
    names = {each.name for each in saved_filters(mill)}
    if len(names) >= _MOST and name not in names:
        raise InvalidOption(f"there are {_MOST} filters already; delete one first")
    note = msgspec.json.encode(SavedFilter(name, query.strip(), who))
    row = HistoryRow("filter", name, ALWAYS, int(clock.wall()), (), note)
    delete_filter(mill, name)
    with_history(mill.broker, "filters").keep_history([row])


def delete_filter(mill: Tidemill, name: str) -> None:
    """Delete a saved search."""
    history = with_history(mill.broker, "filters")
    rows = history.history("filter", ALWAYS, name=name)
    history.keep_history([msgspec.structs.replace(row, sample=b"") for row in rows])
