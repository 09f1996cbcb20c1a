"""The calls of a queue about purges (:mod:`tidemill.brokers.generic.purges`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.brokers.generic.purges import Purge, Restored, list_purges, purge, restore

if TYPE_CHECKING:
    from tidemill.runtime import Runtime


class PurgedQueue:
    """The calls of a queue about purges."""

    _mill: Runtime
    name: str

    def purge(self, *, now: bool = False) -> int:
        """Remove all waiting, scheduled and ready jobs of the queue; return their number.

        The jobs are kept for some time, so that :meth:`restore` can bring them back. With ``now``
        they are deleted for good. When the store has no room to keep them, they are deleted, too,
        and a warning is logged.
        """
        return purge(self._mill.broker, self.name, now=now).jobs

    def purges(self) -> list[Purge]:
        """The purges of the queue that can be restored, the latest first."""
        return list_purges(self._mill.broker, self.name)

    def restore(self, purge_id: str = "") -> Restored:
        """Bring back the jobs of the latest purge, or of the named purge.

        The jobs get back their place, priority, due time and key. Their attempts begin anew.

        Raises:
            TidemillError: there is no purge to restore.
            FeatureMissing: the broker keeps no purged jobs.
        """
        return restore(self._mill.broker, self.name, purge_id)
