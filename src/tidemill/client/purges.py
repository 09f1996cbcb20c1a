"""Purging queues, and bringing back the jobs of a purge.

A purge keeps its jobs in the store as cancelled jobs (:mod:`tidemill.core.purge_mark`). A note in
the store lists the purge. The note is written before the first job is
purged. So the jobs of a purge whose process was killed can be restored, too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import msgspec

from tidemill.brokers.contract.admin import KeptPurge
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.inspection import Filter, check_users
from tidemill.brokers.generic.notes import Notes
from tidemill.client.runtime import Runtime
from tidemill.core.clock import id_time, new_id
from tidemill.core.errors import InvalidOption, StoreFull, TidemillError
from tidemill.core.job import State
from tidemill.core.purge_mark import check_purge_id, is_of_purge

log = logging.getLogger("tidemill")

_KEPT = 90 * 86_400.0
"""Seconds for which a purge is listed."""

_PAGE = 250
"""The most jobs that one call restores."""


class Purge(msgspec.Struct, frozen=True, kw_only=True):
    """A purge whose jobs were kept.

    Attributes:
        id: the id of the purge.
        queue: the purged queue.
        at: the wall time of the purge.
        jobs: the number of its jobs that were not restored; 0 when the number is unknown, because
            the purge was interrupted.
    """

    id: str
    queue: str
    at: float
    jobs: int


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a purge.

    Attributes:
        jobs: the number of jobs that left the queue.
        kept: the number of these jobs that can be restored.
        id: the id of the purge; empty when no job was kept.
    """

    jobs: int
    kept: int = 0
    id: str = ""


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of restoring a purge.

    Attributes:
        jobs: the number of jobs that are in the queue again.
        left: the number of jobs that stay purged. Another job has their key by now, or an earlier
            job did not succeed.
    """

    jobs: int
    left: int


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
        return purge(self._mill, self.name, now=now).jobs

    def purges(self) -> list[Purge]:
        """The purges of the queue that can be restored, the latest first."""
        return list_purges(self._mill, self.name)

    def restore(self, purge_id: str = "") -> Restored:
        """Bring back the jobs of the latest purge, or of the named purge.

        The jobs get back their priority, due time, attempts and key.

        Raises:
            TidemillError: there is no purge to restore.
            FeatureMissing: the broker keeps no purged jobs.
        """
        return restore(self._mill, self.name, purge_id)


def purge(mill: Runtime, queue: str, *, now: bool = False) -> Purged:
    """Purge a queue; keep the jobs unless ``now``, the broker or a lack of room forbids it.

    Raises:
        FeatureMissing: the broker keeps no purged jobs; give ``now``.
        InvalidOption: the queue has the records of groups.
    """
    check_users(queue)
    broker = mill.broker
    if not now and Feature.INSPECT in broker.features:  # a broker without INSPECT keeps no jobs
        need(broker, Feature.RESTORE, "a purge without now=True")
    if now or Feature.RESTORE not in broker.features:
        return Purged(jobs=broker.purge(queue))
    purge_id = new_id()
    try:
        _note(mill, queue, purge_id, 0)
        kept = broker.purge_kept(queue, purge_id)
    except StoreFull:
        kept = KeptPurge(0, is_whole=False)
    with contextlib.suppress(StoreFull):  # the first note stays, without the number of jobs
        _note(mill, queue, purge_id, kept.jobs or None)
    deleted = 0
    if not kept.is_whole:
        deleted = broker.purge(queue)
        log.warning(
            "queue %s: the store has no room to keep purged jobs; %d jobs are deleted for good",
            queue,
            deleted,
        )
    return Purged(jobs=kept.jobs + deleted, kept=kept.jobs, id=purge_id if kept.jobs else "")


def list_purges(mill: Runtime, queue: str) -> list[Purge]:
    """The purges of a queue that can be restored, the latest first."""
    if Feature.RESTORE not in mill.broker.features:
        return []
    found = [msgspec.msgpack.decode(note.body, type=Purge) for note in _kept(mill).list()]
    found = [one for one in found if one.queue == queue]
    return sorted(found, key=lambda one: one.id, reverse=True)


def restore(mill: Runtime, queue: str, purge_id: str = "") -> Restored:
    """Bring back the jobs of a purge, the latest one by default.

    Call this again after an interruption: the new call restores the rest. A new call also tries
    again to restore the jobs that an earlier call has left.

    Raises:
        InvalidOption: no purge can have this id.
        TidemillError: there is no purge to restore.
        FeatureMissing: the broker keeps no purged jobs.
    """
    mill.features.need(Feature.RESTORE, "restore()")
    known = [one.id for one in list_purges(mill, queue)]
    if not known and not purge_id:
        raise TidemillError(f"no purge of queue {queue!r} can be restored")
    purge_id = check_purge_id(purge_id or known[0])
    if id_time(purge_id) is None:
        raise InvalidOption(f"{purge_id!r} is not the id of a purge; queue.purges() lists the ids")
    pieces = [done for done, _ in restore_pieces(mill, queue, purge_id)]
    count = sum(map(len, pieces))
    if not count and purge_id not in known:
        raise TidemillError(f"queue {queue!r} keeps no jobs of a purge {purge_id}")
    jobs = sum(map(sum, pieces))
    end_restore(mill, queue, purge_id, count - jobs)
    return Restored(jobs=jobs, left=count - jobs)


def restore_pieces(
    mill: Runtime, queue: str, purge_id: str, cursor: str = ""
) -> Iterator[tuple[list[bool], str]]:
    """Bring back the jobs of a purge in pieces, from a place in the list of cancelled jobs.

    Yields for each piece a list, with True for each restored job, and the cursor of the next piece.
    """
    broker, what = mill.broker, Filter(states=frozenset({State.CANCELLED}), queue=queue)
    # The newest job comes first. The first job of a flow is its newest job. So each job of a flow
    # is restored before the jobs that wait for this job.
    while True:
        page = broker.find(what, _PAGE, cursor)
        ids = [job.envelope.id for job in page.records if is_of_purge(job.error, purge_id)]
        done = broker.restore(ids, purge_id) if ids else []
        cursor = page.cursor
        yield done, cursor
        if not cursor:
            return


def end_restore(mill: Runtime, queue: str, purge_id: str, left: int) -> None:
    """Write how many jobs of a purge are left, or take the purge off the list."""
    with contextlib.suppress(StoreFull):
        _note(mill, queue, purge_id, left or None)


def forget_purges(mill: Runtime, queue: str) -> None:
    """Take the purges of a queue off the list, as the queue is deleted."""
    for one in list_purges(mill, queue):
        _note(mill, queue, one.id, None)


def _note(mill: Runtime, queue: str, purge_id: str, jobs: int | None) -> None:
    """Write the number of jobs that a purge keeps; None deletes the note."""
    if jobs is not None:
        purged = Purge(id=purge_id, queue=queue, at=id_time(purge_id) or 0.0, jobs=jobs)
        _kept(mill).put(purge_id, msgspec.msgpack.encode(purged), seconds=_KEPT)
    elif note := _kept(mill).get(purge_id):
        _kept(mill).delete(note)


def _kept(mill: Runtime) -> Notes:
    return Notes(mill.broker, "purge", "purge()")
