"""Purging queues, and bringing back the jobs of a purge.

A purge cancels its jobs with an error that names the purge (:mod:`tidemill.core.job`). A
restore finds these jobs by their error and retries them. A note in the store lists the purge. The
note is written before the first job is purged. So the jobs of a purge whose process was killed can
be restored, too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec

from tidemill.brokers.contract.admin import NativePurge
from tidemill.brokers.contract.features import Feature, need
from tidemill.brokers.contract.inspection import Filter, check_users
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.notes import Notes
from tidemill.core.clock import clock, id_time, new_id
from tidemill.core.crash_points import point
from tidemill.core.job import WAITING_STATES, Record, State, is_of_purge
from tidemill.errors import InvalidOption, StoreFull, TidemillError

log = logging.getLogger("tidemill")

_KEPT = 90 * 86_400.0  # seconds for which a purge is listed

WHY_LEFT = "another job has their key, they have expired, or they belong to a flow"
"""Why a restore leaves jobs purged."""

_PIECE = 500  # the most jobs that one call of the store changes


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
    jobs: int  # the number of jobs that left the queue
    kept: int = 0  # the number of these jobs that can be restored
    id: str = ""  # the id of the purge; empty when no job was kept


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of restoring a purge.

    Attributes:
        jobs: the number of jobs that are in the queue again.
        left: the number of jobs that stay purged: see ``WHY_LEFT``.
    """

    jobs: int
    left: int


def purge(store: Store, queue: str, *, now: bool = False) -> Purged:
    """Purge a queue; keep the jobs unless ``now``, the broker or a lack of room forbids it."""
    check_users(queue)
    if now or Feature.INSPECT not in store.features:  # without INSPECT, nobody could find the jobs
        return Purged(jobs=delete_waiting(store, queue))
    purge_id, kept, deleted = new_id(), 0, 0
    try:
        _note(store, queue, purge_id, 0)
        for ids in _waiting(store, queue):
            kept += sum(store.cancel(ids, purge=purge_id))
            point("purge.piece")
    except StoreFull:
        deleted = delete_waiting(store, queue)
        log.warning(
            "queue %s: the store has no room to keep purged jobs; %d jobs are deleted for good",
            queue,
            deleted,
        )
    with contextlib.suppress(StoreFull):  # the first note stays, without the number of jobs
        _note(store, queue, purge_id, kept or None)
    return Purged(jobs=kept + deleted, kept=kept, id=purge_id if kept else "")


def delete_waiting(store: Store, queue: str) -> int:
    """Delete all jobs of a queue that are neither running nor finished; return how many."""
    # A job may start between the search and the deletion, and must stay. So jobs are cancelled
    # first.
    if Feature.INSPECT not in store.features:
        return cast("NativePurge", store).purge(queue)
    deleted, purge_id = 0, new_id()
    for ids in _waiting(store, queue):
        with contextlib.suppress(StoreFull):  # without room, a job that starts now goes, too
            done = store.cancel(ids, purge=purge_id)
            ids = list(itertools.compress(ids, done))
        deleted += sum(store.delete(ids))
    return deleted


def _waiting(store: Store, queue: str) -> Iterator[list[str]]:
    """The ids of the jobs of a queue that have not started, in pieces; the jobs of flows last."""
    # The search goes from new jobs to old jobs. So it ends, although producers put more jobs. A
    # flow puts each job before the jobs for which it waits. So the jobs of flows are sorted, the
    # oldest first: the end of a job must not end the jobs that wait for it before their turn.
    what, cursor, of_flows = Filter(states=WAITING_STATES, queue=queue), "", list[str]()
    while True:
        page = store.find(what, _PIECE, cursor)
        jobs = [record.envelope for record in page.records]
        of_flows += [job.id for job in jobs if job.links is not None]
        if alone := [job.id for job in jobs if job.links is None]:
            yield alone
        cursor = page.cursor
        if not cursor:
            break
    for end in range(len(of_flows), 0, -_PIECE):
        yield of_flows[max(0, end - _PIECE) : end][::-1]


def list_purges(store: Store, queue: str) -> list[Purge]:
    """The purges of a queue that can be restored, the latest first."""
    if Feature.INSPECT not in store.features:
        return []
    found = [msgspec.msgpack.decode(note.body, type=Purge) for note in _kept(store).list()]
    found = [one for one in found if one.queue == queue]
    return sorted(found, key=lambda one: one.id, reverse=True)


def restore(store: Store, queue: str, purge_id: str = "") -> Restored:
    """Bring back the jobs of a purge, the latest one by default.

    Call this again after an interruption: the new call restores the rest. A new call also tries
    again to restore the jobs that an earlier call has left.

    Raises:
        InvalidOption: no purge can have this id.
        TidemillError: there is no purge to restore.
        FeatureMissing: the broker keeps no purged jobs.
    """
    need(store, Feature.INSPECT, "restore()")
    known = [one.id for one in list_purges(store, queue)]
    if not known and not purge_id:
        raise TidemillError(f"no purge of queue {queue!r} can be restored")
    purge_id = purge_id or known[0]
    if id_time(purge_id) is None:
        raise InvalidOption(
            f"{purge_id[:80]!r} is not the id of a purge; queue.purges() lists the ids"
        )
    pieces = [done for done, _ in restore_pieces(store, queue, purge_id)]
    done = Restored(jobs=sum(one.jobs for one in pieces), left=sum(one.left for one in pieces))
    if not done.jobs + done.left and purge_id not in known:
        raise TidemillError(f"queue {queue!r} keeps no jobs of a purge {purge_id}")
    end_restore(store, queue, purge_id, done.left)
    return done


def restore_pieces(
    store: Store, queue: str, purge_id: str, cursor: str = ""
) -> Iterator[tuple[Restored, str]]:
    """Bring back the jobs of a purge in pieces, from a place in the list of cancelled jobs."""
    # Yields the effect of each piece, and the cursor of the next piece.
    what = Filter(states=frozenset({State.CANCELLED}), queue=queue)
    while True:
        page = store.find(what, _PIECE, cursor)
        cursor = page.cursor
        yield _restore(store, [r for r in page.records if is_of_purge(r.error, purge_id)]), cursor
        if not cursor:
            return


def _restore(store: Store, purged: Sequence[Record]) -> Restored:
    now, by_due = clock.wall(), defaultdict[float, list[str]](list)
    for job in purged:
        if job.envelope.links is None and not 0 < job.expires <= now:
            by_due[job.due if job.due > now else 0.0].append(job.envelope.id)
    jobs = sum(sum(store.retry(ids, due=due)) for due, ids in by_due.items())
    return Restored(jobs=jobs, left=len(purged) - jobs)


def end_restore(store: Store, queue: str, purge_id: str, left: int) -> None:
    """Write how many jobs of a purge are left, or take the purge off the list."""
    with contextlib.suppress(StoreFull):
        _note(store, queue, purge_id, left or None)


def forget_purges(store: Store, queue: str) -> None:
    """Take the purges of a queue off the list, as the queue is deleted."""
    for one in list_purges(store, queue):
        _note(store, queue, one.id, None)


def _note(store: Store, queue: str, purge_id: str, jobs: int | None) -> None:
    """Write the number of jobs that a purge keeps; None deletes the note."""
    if jobs is not None:
        purged = Purge(id=purge_id, queue=queue, at=id_time(purge_id) or 0.0, jobs=jobs)
        _kept(store).put(purge_id, msgspec.msgpack.encode(purged), seconds=_KEPT)
    elif note := _kept(store).get(purge_id):
        _kept(store).delete(note)


def _kept(store: Store) -> Notes:
    return Notes(store, "purge", "purge()")
