"""Notes: small things that a store remembers for tools, such as the audit list of the dashboard.

A note is a named record whose name begins with :data:`NOTE`. When a note comes due, a worker
deletes the note (:mod:`tidemill.worker.declarations`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.schedules import NOTE, Change, Schedule
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock

_PAGE = 500
_LONGEST = 120  # the most bytes of a name that a record name holds; a hash stands for a longer name


class Notes:
    """The notes of one kind in a store."""

    def __init__(self, store: Store, kind: str, option: str) -> None:
        need(store, Feature.HISTORY, option)
        self._store = store
        self._before = f"{NOTE}{kind}\x1f"

    def list(self, first: str = "", last: str = "\U0010ffff") -> Iterator[Schedule]:
        """The notes whose names are after ``first`` and before ``last``, by name, page by page."""
        after, end = self._before + first, self._before + last
        while after < end and (page := self._store.list_schedules(after, _PAGE)):
            yield from (note for note in page if note.name < end)
            after = page[-1].name

    def get(self, name: str) -> Schedule | None:
        return self._store.schedules([self._named(name)])[0]

    def put(self, name: str, body: bytes, *, seconds: float = 0.0) -> Schedule:
        """Write a note over any earlier note of this name; with ``seconds``, for so long."""
        while True:
            before = self.get(name) or Schedule(self._named(name), 0)
            if note := self.replace(before, body, seconds=seconds):
                return note

    def replace(self, before: Schedule, body: bytes, *, seconds: float = 0.0) -> Schedule | None:
        """Write a note in place of the note ``before``; None if somebody else has replaced it."""
        due = clock.wall() + seconds if seconds else 0.0
        [changed] = self._store.change_schedules([Change(before.name, before.version, due, body)])
        return Schedule(before.name, changed.version, due, body) if changed.done else None

    def delete(self, *notes: Schedule) -> bool:
        """Delete notes; False if somebody else has replaced one of them, which then stays."""
        gone = [Change(note.name, note.version, gone=True) for note in notes]
        return all(changed.done for changed in self._store.change_schedules(gone))

    def _named(self, name: str) -> str:
        if len(name.encode()) > _LONGEST:
            import hashlib

            name = hashlib.blake2b(name.encode(), digest_size=20).hexdigest()
        return self._before + name
