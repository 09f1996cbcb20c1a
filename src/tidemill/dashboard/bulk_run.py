"""Bulk operations: one action on all jobs that match a search, run in the background.

A thread of the process that started the operation works through the jobs, newest first, at the
given rate. This thread is the *runner*. The note of the operation (:mod:`.bulk_notes`) names the
place in the list of jobs at which the next piece begins. The runner acts on a piece and then writes
the next place into the note. If the runner dies in between, the next runner repeats the piece. This
does no harm: an act on a job that is acted on already changes nothing, and a job that has ended
again since the start is left out.

When the note is old, the operation is *interrupted*: its runner has died, is stopped, or waits for
a slow store. Any process may resume the operation from the note. A runner that comes back finds
another note and ends, at the latest after one more piece.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Sequence

import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.generic.purges import WHY_LEFT, Purge, end_restore, restore_pieces
from tidemill.core.clock import clock, new_id
from tidemill.core.errors import InvalidOption, TidemillError
from tidemill.core.job import FINISHED, WAITING_STATES, Record, State
from tidemill.dashboard import audit
from tidemill.dashboard.bulk_notes import (
    CHANGED,
    Bulk,
    SupersededError,
    forget_old,
    hear,
    keep,
    take_over,
)
from tidemill.dashboard.job_actions import ACTIONS, HAS_ALREADY, act, has
from tidemill.dashboard.job_list import need_lists, pages_of
from tidemill.dashboard.job_query import JobQuery, parse, query_text
from tidemill.dashboard.target import Target

log = logging.getLogger("tidemill.dashboard")

RATES = (5, 20, 100, 500, 0)
"""The rates that the page offers, in jobs per second; 0 for no limit."""

_PIECE = 200  # jobs in one act
_BEAT = 2.0  # seconds after which the runner writes its note, even if nothing has changed
_LOOK_EVERY = 1.0  # seconds between two looks whether a user asks to stop
_PROBE_EVERY = 0.5  # seconds between two reads of the jobs that were retried first
_PROBE_MOST = 300.0  # seconds in which the jobs that were retried first must end
_EXAMPLES = 5


class Survey(msgspec.Struct, frozen=True):
    """The jobs that an operation would act on: their number, some examples, and the oldest job.

    ``is_exact`` is False when counting took too long: there may be more jobs than ``number``.
    """

    number: int
    is_exact: bool
    examples: list[Record]
    oldest: Record | None


def narrowed(query: JobQuery, action: str) -> JobQuery:
    """The search, narrowed to jobs on which the action can work.

    If the search names no states, retry takes failed jobs, and cancel and terminate take unfinished
    jobs.

    Raises:
        InvalidOption: the search is empty.
    """
    if query.is_empty:
        raise InvalidOption(
            "an action on all jobs needs a search, such as state:failed or queue:mail; "
            "an empty search would match every job"
        )
    states = {"retry": (State.FAILED,), "cancel": [s for s in State if s not in FINISHED]}
    states["terminate"] = states["cancel"]
    states["alter"] = [s for s in State if s in WAITING_STATES]
    named = "state" in query.tokens
    if action in states and not named:
        query = query.with_value("state", ",".join(state.value for state in states[action]))
    return query


def survey(mill: Tidemill, query: JobQuery, action: str, patience: float) -> Survey:
    """Count the jobs of an operation for ``patience`` seconds at most."""
    need_lists(mill, query)
    until, number = time.monotonic() + patience, 0
    examples: list[Record] = []
    oldest: Record | None = None
    for records, cursor in pages_of(mill, query):
        number += len(records)
        examples += records[: _EXAMPLES - len(examples)]
        oldest = records[-1] if records else oldest
        if cursor and time.monotonic() > until:
            return Survey(number, False, examples, oldest)
    return Survey(number, True, examples, oldest)


# -- running ---------------------------------------------------------------------------------------


def start(
    mill: Tidemill,
    action: str,
    query: JobQuery,
    who: str,
    *,
    rate: int = 0,
    first: int = 0,
    expected: int = 0,
    target: Target = Target(),  # noqa: B008 - frozen
) -> Bulk:
    """Start an operation in the background.

    Raises:
        InvalidOption: the search is empty, or there is no such action.
        FeatureMissing: the broker keeps no history, or cannot list jobs in these states.
    """
    if action not in ACTIONS:
        raise InvalidOption(f"choose an action: {', '.join(ACTIONS)}")
    query = narrowed(query, action)
    need_lists(mill, query)
    forget_old(mill)
    bulk = Bulk(
        id=new_id(),
        action=action,
        query=str(query),
        target=target,
        who=who,
        started=clock.wall(),
        moment=mill.broker.wall(),
        rate=max(0, rate),
        first=max(0, first) if action == "retry" else 0,
        expected=expected,
    )
    audit.note(mill, who, f"started {bulk.what}", bulk.query, expected)
    _launch(mill, bulk)
    return bulk


def start_restore(mill: Tidemill, purge: Purge, who: str) -> Bulk:
    """Start to bring back the jobs of a purge in the background."""
    forget_old(mill)
    queue = purge.queue
    bulk = Bulk(
        id=new_id(),
        action="restore",
        query=query_text(state="cancelled", queue=queue),
        target=Target(queue=queue, text=f"queue {queue}"),
        purge=purge.id,
        who=who,
        started=clock.wall(),
        expected=purge.jobs,
    )
    audit.note(mill, who, f"started {bulk.what}", bulk.query, purge.jobs)
    _launch(mill, bulk)
    return bulk


def resume(mill: Tidemill, bulk: Bulk) -> None:
    """Continue a stopped, interrupted or failed operation at the place in its note.

    Raises:
        InvalidOption: the operation runs, is done, or somebody else has changed it just now.
    """
    if bulk.shown_state not in ("stopped", "interrupted", "failed"):
        raise InvalidOption(f"the operation is {bulk.shown_state}; there is nothing to resume")
    _launch(mill, bulk)


def _launch(mill: Tidemill, bulk: Bulk) -> None:
    try:
        take_over(mill, bulk, new_id())
    except SupersededError:
        raise InvalidOption(CHANGED) from None
    runner = _Runner(mill, bulk)
    thread = threading.Thread(target=runner.run, name=f"bulk-{bulk.id[-8:]}", daemon=True)

    def end() -> None:
        runner.ended.set()
        if threading.current_thread() is not thread:
            thread.join(5)

    mill.runtime.before_close.append(end)
    thread.start()


class _Runner:
    """The thread of one operation."""

    def __init__(self, mill: Tidemill, bulk: Bulk) -> None:
        self._mill = mill
        self._bulk = bulk
        self._reasons = collections.Counter(bulk.reasons)
        self.ended = threading.Event()  # the app is being closed

    def run(self) -> None:
        """Work through all jobs."""
        bulk = self._bulk
        try:
            self._work()
            if not self.ended.is_set() or bulk.state != "running":
                self._end("done" if bulk.state == "running" else bulk.state)
        except SupersededError:
            log.info("another process goes on with the operation %s on jobs", bulk.id)
        except TidemillError as error:
            self._end("failed", str(error))
        except Exception:
            log.exception("the operation %s on jobs failed", bulk.id)
            self._end("failed", "the log of the dashboard has the error")

    def _end(self, state: str, text: str = "") -> None:
        bulk = self._bulk
        bulk.state, bulk.text = state, text or bulk.text
        # If the store is away, the old note stays, and any process may resume the operation.
        with contextlib.suppress(TidemillError, SupersededError):
            self._keep()
            what = f"{'finished' if state == 'done' else state} {bulk.what}"
            audit.note(self._mill, bulk.who, what, bulk.query, bulk.done)

    def _restore(self) -> None:
        """Bring back the jobs of a purge. A piece that is done again brings back no job twice."""
        bulk = self._bulk
        queue = bulk.target.queue or ""
        if not bulk.cursor:
            bulk.refused = 0  # a restore from the start offers all remaining jobs again
        broker = self._mill.broker
        for done, cursor in restore_pieces(broker, queue, bulk.purge, bulk.cursor):
            bulk.done += done.jobs
            bulk.refused += done.left
            if bulk.refused:
                bulk.reasons = {WHY_LEFT: bulk.refused}
            bulk.cursor = cursor
            self._keep()
            if cursor and not self._goes_on(0.0):
                return
        end_restore(broker, queue, bulk.purge, bulk.refused)

    def _work(self) -> None:
        bulk = self._bulk
        if bulk.action == "restore":
            self._restore()
            return
        query = parse(bulk.query)
        size = min(_PIECE, bulk.rate or _PIECE)
        if bulk.probes and not self._judge():
            return
        for records, cursor in pages_of(self._mill, query, bulk.cursor, size):
            ids = self._to_change(records)
            while ids:
                piece = ids[: self._to_probe] if self._to_probe else ids
                ids = ids[len(piece) :]
                if not self._piece(piece, bulk.cursor if ids else cursor):
                    return
                wait = len(piece) / bulk.rate if bulk.rate else 0.0
                if (ids or cursor) and not self._goes_on(wait):
                    return
            bulk.cursor = cursor
            if cursor and not self._goes_on(0.0):
                return

    @property
    def _to_probe(self) -> int:
        """The number of jobs still to retry before the runner waits for their outcome."""
        return max(0, self._bulk.first - self._bulk.done)

    def _piece(self, ids: Sequence[str], cursor: str) -> bool:
        """Act on some jobs; False when the operation must stop.

        ``cursor`` is the place after these jobs: a stopped operation resumes there.
        """
        bulk = self._bulk
        if not self._goes_on(0.0):
            return False
        is_probe = self._to_probe > 0
        done = act(self._mill, bulk.action, ids, bulk.target)
        bulk.done += done.done
        bulk.refused += done.refused
        self._reasons.update(dict(done.reasons))
        bulk.reasons = dict(self._reasons.most_common(5))
        if is_probe:
            bulk.probes = [*bulk.probes, *ids]
        else:
            bulk.cursor = cursor
        self._keep()
        return not is_probe or self._to_probe > 0 or self._judge()

    def _to_change(self, records: Sequence[Record]) -> list[str]:
        """The ids of the jobs to act on. Jobs that have ended since the start are left out."""
        bulk = self._bulk
        records = [record for record in records if record.finished <= bulk.moment]
        if bulk.action != "alter":
            return [record.envelope.id for record in records]
        new = [record.envelope.id for record in records if not has(record, bulk.target)]
        if len(new) < len(records):
            bulk.refused += len(records) - len(new)
            self._reasons[HAS_ALREADY] += len(records) - len(new)
            bulk.reasons = dict(self._reasons.most_common(5))
        return new

    def _keep(self) -> None:
        """Write the note. If a user has asked to stop meanwhile, the note says that, too."""
        while True:
            try:
                return keep(self._mill, self._bulk)
            except SupersededError:
                hear(self._mill, self._bulk)

    def _goes_on(self, seconds: float) -> bool:
        """Wait, and return True. Return False when a user stops the operation or the app closes."""
        bulk, until = self._bulk, time.monotonic() + seconds
        while not self.ended.is_set():
            hear(self._mill, bulk)
            if bulk.is_stopping:
                bulk.state, bulk.text = "stopped", "a user stopped the operation"
                return False
            if clock.wall() - bulk.beat > _BEAT:
                self._keep()
            left = until - time.monotonic()
            if left <= 0:
                return True
            self.ended.wait(min(left, _LOOK_EVERY))
        return False

    def _judge(self) -> bool:
        """Wait for the jobs that were retried first; False unless all of them succeed in time."""
        bulk, until = self._bulk, time.monotonic() + _PROBE_MOST
        bulk.text = f"waits for the first {len(bulk.probes)} jobs"
        while time.monotonic() < until:
            self._keep()
            records = self._mill.broker.wait_for(bulk.probes, 0)
            ends = [record.state for record in records if record is not None]
            bad = [state for state in ends if state.finished and state is not State.SUCCEEDED]
            if bad:
                bulk.state = "stopped"
                bulk.text = f"{len(bad)} of the first {len(bulk.probes)} jobs {bad[0]} again"
                bulk.probes, bulk.first = [], 0
                return False
            if all(state.finished for state in ends):
                bulk.probes, bulk.text = [], ""
                return True
            if not self._goes_on(_PROBE_EVERY):
                return False
        bulk.state = "stopped"
        bulk.text = f"the first jobs did not end within {_PROBE_MOST:.0f} s"
        return False
