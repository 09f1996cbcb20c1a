"""Bulk operations: one action on all jobs that match a search, and the pages of operations.

A thread of the process that started the operation works through the jobs, newest first, at the
given rate. This thread is the *runner*. After each piece of jobs the runner writes the counts and
the place of the next piece into the note of the operation. If the runner dies in between, the next
runner repeats the piece. This does no harm: an act on a job that is acted on already changes
nothing, and a job that has ended again since the start is left out.

When the note is old, the operation is *interrupted*: its runner has died, is stopped, or waits for
a slow store. Any process may resume the operation from the note. Each writer replaces the note that
it has read or written last (:attr:`Bulk.kept`). So a runner that comes back finds that somebody
else has replaced its note, and ends, at the latest after one more piece.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import msgspec
from starlette.responses import Response

from tidemill.app import Tidemill
from tidemill.brokers.contract.schedules import Schedule
from tidemill.brokers.generic import audit
from tidemill.brokers.generic.notes import Notes
from tidemill.brokers.generic.purges import WHY_LEFT, Purge, end_restore, restore_pieces
from tidemill.core.clock import clock, new_id
from tidemill.core.job import FINISHED, WAITING_STATES, Record, State
from tidemill.core.words import counted
from tidemill.dashboard.job_search import JobQuery, need_lists, pages_of, parse, query_text
from tidemill.dashboard.jobs import ACTIONS, Done, Target, act, grouped, query_of, target_of
from tidemill.dashboard.page import Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.errors import InvalidOption, TidemillError

log = logging.getLogger("tidemill.dashboard")
routes = Routes()

SILENT = 10.0  # seconds: a running operation with an older note counts as interrupted
RATES = (5, 20, 100, 500, 0)  # the rates that the page offers, in jobs per second; 0 for no limit
_KEPT = 90 * 86_400.0  # seconds for which a note is kept
_SHOWN = 100
_FIRST_MOST = 1000
_PIECE = 200  # jobs in one act
_LOOK_EVERY = 1.0  # seconds between two looks whether a user asks to stop
_PROBE_EVERY = 0.5  # seconds between two reads of the jobs that were retried first
_PROBE_MOST = 300.0  # seconds in which the jobs that were retried first must end
_EXAMPLES = 5
_PATIENCE = 0.06  # seconds for which a preview counts jobs, unless the user asks to count all
_TITLES = {name: f"{action.label} all that match" for name, action in ACTIONS.items()}
_TITLES["restore"] = "Restore a purge"


class Bulk(msgspec.Struct, kw_only=True):
    """An operation on all jobs that match; its note has all attributes but ``kept``."""

    id: str
    action: str  # ``retry``, ``cancel``, ``terminate``, ``alter``, ``delete`` or ``restore``
    query: str  # the search
    target: Target = Target()  # what ``alter`` gives to the jobs; the queue of ``restore``
    purge: str = ""  # the id of the purge whose jobs ``restore`` brings back
    who: str = ""  # the user who started the operation
    started: float = 0.0  # wall time
    beat: float = 0.0  # the wall time of the latest write of the note
    # The store's time at the start. Jobs that entered their state later are left out, so the
    # operation ends although a retried job fails again.
    moment: float = 0.0
    rate: int = 0  # jobs per second; 0 for no limit
    first: int = 0  # jobs to retry first; 0 for none, or after their outcome is known
    expected: int = 0  # the number of jobs that matched when the operation was started
    state: str = "running"  # or ``done``, ``stopped`` or ``failed``
    cursor: str = ""  # the place in the list of jobs where the next piece begins
    done: int = 0  # the number of jobs that the store changed
    refused: int = 0  # the number of jobs that the store refused to change
    reasons: dict[str, int] = {}  # the most frequent reasons of refusals
    text: str = ""  # the present step of the operation, or why it ended
    runner: str = ""  # the id of the thread that works on the operation
    kept: Schedule | None = None  # the note as this process has read or written it last

    @property
    def shown_state(self) -> str:
        """The state, or ``interrupted`` when the process of a running operation has died."""
        silent = self.state == "running" and clock.wall() - self.beat > SILENT
        return "interrupted" if silent else self.state

    @property
    def what(self) -> str:
        """The action in the words of the audit list."""
        return f"bulk {self.action}{self.target.noted}"

    @property
    def part(self) -> float:
        """The part of the jobs that are done, 0 to 1."""
        if self.state == "done":
            return 1.0
        return self.outcomes / self.total if self.total else 0.0

    @property
    def total(self) -> int:
        """Matching jobs at the start, or jobs acted on if these are more; 0 without a count."""
        return max(self.expected, self.outcomes) if self.expected else 0

    @property
    def outcomes(self) -> int:
        """The number of jobs on which the operation has acted, according to its note."""
        return self.done + self.refused

    @property
    def left(self) -> list[tuple[str, int]]:
        """Why jobs were left as they are, with the number of jobs of each reason."""
        missing = max(0, self.expected - self.outcomes)
        why = (
            "changed before the operation reached them"
            if self.state == "done"
            else "not reached yet"
        )
        return grouped(self.refused, self.reasons) + ([(why, missing)] if missing else [])


class Survey(msgspec.Struct, frozen=True):
    """The jobs that an operation would act on: their number, some examples, and the oldest job."""

    number: int
    is_exact: bool  # False when counting took too long: there may be more jobs
    examples: list[Record]
    oldest: Record | None


def narrowed(query: JobQuery, action: str) -> JobQuery:
    """The search, narrowed to jobs on which the action can work, if the search names no states."""
    if query.is_empty:
        raise InvalidOption(
            "an action on all jobs needs a search, such as state:failed or queue:mail; "
            "an empty search would match every job"
        )
    states = {"retry": (State.FAILED,), "cancel": [s for s in State if s not in FINISHED]}
    states["terminate"] = states["cancel"]
    states["alter"] = [s for s in State if s in WAITING_STATES]
    if action in states and "state" not in query.tokens:
        query = query.with_value("state", ",".join(state.value for state in states[action]))
    return query


def survey(mill: Tidemill, query: JobQuery, patience: float) -> Survey:
    """Count the jobs of an operation for ``patience`` seconds at most."""
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


# -- notes -----------------------------------------------------------------------------------------


def _notes(mill: Tidemill) -> Notes:
    return Notes(mill.broker, "bulk", "bulk operations")


def _read(note: Schedule) -> Bulk:
    bulk = msgspec.json.decode(note.body, type=Bulk)
    bulk.kept = note
    return bulk


def operations(mill: Tidemill) -> list[Bulk]:
    found = [_read(note) for note in _notes(mill).list()]
    return sorted(found, key=lambda bulk: -bulk.started)


def get(mill: Tidemill, bulk_id: str) -> Bulk:
    note = _notes(mill).get(bulk_id)
    if note is None:
        raise InvalidOption(f"there is no operation {bulk_id[:60]}")
    return _read(note)


def _keep(mill: Tidemill, bulk: Bulk) -> bool:
    """Write the note of an operation; False if somebody else has replaced the note meanwhile."""
    bulk.beat = clock.wall()
    body = msgspec.json.encode(msgspec.structs.replace(bulk, kept=None))
    if bulk.kept is None:
        bulk.kept = _notes(mill).put(bulk.id, body, seconds=_KEPT)
        return True
    kept = _notes(mill).replace(bulk.kept, body, seconds=_KEPT)
    bulk.kept = kept or bulk.kept
    return kept is not None


def _changed() -> InvalidOption:
    return InvalidOption("somebody else has changed the operation just now; look at it again")


def request_stop(mill: Tidemill, bulk: Bulk) -> None:
    while bulk.state == "running":
        bulk.state, bulk.text = "stopped", "a user stopped the operation"
        if not _keep(mill, bulk):  # the runner has written its progress meanwhile
            bulk = get(mill, bulk.id)


def forget(mill: Tidemill, bulk: Bulk) -> None:
    """Delete the note of an operation that does not run."""
    if bulk.shown_state == "running":
        raise InvalidOption("stop the operation first")
    assert bulk.kept is not None
    if not _notes(mill).delete(bulk.kept):
        raise _changed()


# -- running ---------------------------------------------------------------------------------------


def start(mill: Tidemill, bulk: Bulk) -> Bulk:
    """Start an operation in the background. Raises FeatureMissing where jobs cannot be listed."""
    need_lists(mill, parse(bulk.query))
    bulk.started, bulk.moment = clock.wall(), mill.broker.wall()
    audit.note(mill.broker, bulk.who, f"started {bulk.what}", bulk.query, bulk.expected)
    _launch(mill, bulk)
    return bulk


def start_restore(mill: Tidemill, purge: Purge, who: str) -> Bulk:
    """Start to bring back the jobs of a purge in the background."""
    query = query_text(state="cancelled", queue=purge.queue)
    target = Target(queue=purge.queue, text=f"queue {purge.queue}")
    bulk = Bulk(id=new_id(), action="restore", query=query, target=target, purge=purge.id, who=who)
    bulk.expected = purge.jobs
    return start(mill, bulk)


def resume(mill: Tidemill, bulk: Bulk) -> None:
    """Continue a stopped, interrupted or failed operation at the place in its note."""
    if bulk.shown_state not in ("stopped", "interrupted", "failed"):
        raise InvalidOption(f"the operation is {bulk.shown_state}; there is nothing to resume")
    _launch(mill, bulk)


def _launch(mill: Tidemill, bulk: Bulk) -> None:
    """Make a new thread the only runner of an operation."""
    bulk.state, bulk.text, bulk.runner = "running", "", new_id()
    if not _keep(mill, bulk):
        raise _changed()
    runner = _Runner(mill, bulk)
    thread = threading.Thread(target=runner.run, name=f"bulk-{bulk.id[-8:]}", daemon=True)

    def end() -> None:
        runner.closing.set()
        if threading.current_thread() is not thread:
            thread.join(5)

    mill.runtime.before_close.append(end)
    thread.start()


class _StoppedError(Exception):
    """The operation stops; the text says why."""


class _LeftError(Exception):
    """The runner ends and leaves the note: another has replaced it, or the app closes."""


class _Runner:
    def __init__(self, mill: Tidemill, bulk: Bulk) -> None:
        self._mill = mill
        self._bulk = bulk
        self.closing = threading.Event()  # the app is being closed

    def run(self) -> None:
        bulk = self._bulk
        try:
            self._go_on()
            if bulk.first:
                self._try_first()
            for done, cursor in self._pieces():
                bulk.cursor = cursor
                self._count(done)
                if cursor:
                    self._go_on((done.done + done.refused) / bulk.rate if bulk.rate else 0.0)
            self._end("done")
        except _LeftError:
            log.info("another process goes on with the operation %s on jobs", bulk.id)
        except _StoppedError as why:
            self._end("stopped", str(why))
        except TidemillError as error:
            self._end("failed", str(error))
        except Exception:
            log.exception("the operation %s on jobs failed", bulk.id)
            self._end("failed", "the log of the dashboard has the error")

    def _end(self, state: str, text: str = "") -> None:
        bulk = self._bulk
        bulk.state, bulk.text = state, text
        # If the store is away, the old note stays, and any process may resume the operation.
        with contextlib.suppress(TidemillError):
            if _keep(self._mill, bulk):
                what = f"{'finished' if state == 'done' else state} {bulk.what}"
                audit.note(self._mill.broker, bulk.who, what, bulk.query, bulk.done)

    def _pieces(self) -> Iterator[tuple[Done, str]]:
        """Act on piece after piece: yields the outcome of each, and the place of the next."""
        bulk, broker = self._bulk, self._mill.broker
        if bulk.action == "restore":
            queue = bulk.target.queue or ""
            for piece, cursor in restore_pieces(broker, queue, bulk.purge, bulk.cursor):
                why = [(WHY_LEFT, piece.left)] if piece.left else []
                yield Done(piece.jobs, piece.left, why), cursor
            end_restore(broker, queue, bulk.purge, bulk.refused)
            return
        size = min(_PIECE, bulk.rate or _PIECE)
        for records, cursor in pages_of(self._mill, parse(bulk.query), bulk.cursor, size):
            yield self._act(records), cursor

    def _act(self, records: list[Record]) -> Done:
        """Act on jobs, without those that have ended since the start."""
        bulk = self._bulk
        ids = [each.envelope.id for each in records if each.finished <= bulk.moment]
        return act(self._mill, bulk.action, ids, bulk.target) if ids else Done(0, 0, [])

    def _count(self, done: Done) -> None:
        """Write the outcome of a piece into the note."""
        bulk = self._bulk
        bulk.done += done.done
        bulk.refused += done.refused
        reasons = collections.Counter(bulk.reasons)
        reasons.update(dict(done.reasons))
        bulk.reasons = dict(reasons.most_common(5))
        if not _keep(self._mill, bulk):
            self._go_on()

    def _go_on(self, seconds: float = 0.0) -> None:
        """Wait, and read the note. Raises _StoppedError or _LeftError, also when the app closes."""
        bulk, until = self._bulk, time.monotonic() + seconds
        while not self.closing.is_set():
            note = _notes(self._mill).get(bulk.id)
            latest = _read(note) if note is not None else None
            if latest is None or latest.runner != bulk.runner:
                raise _LeftError
            bulk.kept = note
            if latest.state == "stopped":
                raise _StoppedError(latest.text)
            left = until - time.monotonic()
            if left <= 0:
                return
            self.closing.wait(min(left, _LOOK_EVERY))
        raise _LeftError

    def _try_first(self) -> None:
        """Retry some jobs, and stop unless all of them succeed in time."""
        bulk, count = self._bulk, self._bulk.first
        jobs: list[Record] = []
        for records, _ in pages_of(self._mill, parse(bulk.query), size=count):
            jobs = [*jobs, *records][:count]
            if len(jobs) == count:
                break
        done = self._act(jobs)
        bulk.text = f"waits for the first {counted(len(jobs), 'job')}"
        self._count(done)
        until = time.monotonic() + _PROBE_MOST
        while time.monotonic() < until:
            found = self._mill.broker.wait_for([job.envelope.id for job in jobs], 0)
            ends = [record.state for record in found if record is not None]
            bad = [state for state in ends if state.finished and state is not State.SUCCEEDED]
            if bad:
                bulk.first = 0
                raise _StoppedError(
                    f"{len(bad)} of the first {counted(len(jobs), 'job')} {bad[0]} again"
                )
            if all(state.finished for state in ends):
                bulk.first, bulk.text = 0, ""
                return
            self._count(Done(0, 0, []))
            self._go_on(_PROBE_EVERY)
        raise _StoppedError(f"the first jobs did not end within {_PROBE_MOST:.0f} s")


# -- pages -----------------------------------------------------------------------------------------


@routes.get("/bulk")
def bulk_list(page: Page) -> Response:
    found = operations(page.mill)[:_SHOWN]
    return page.render(
        "bulk.html",
        title="Bulk operations",
        operations=found,
        titles=_TITLES,
        every=1 if any(each.state == "running" for each in found) else 10,
    )


@routes.get("/bulk/new", Role.OPERATOR)
def preview(page: Page) -> Response:
    action, text = _action(page.request.arg("act")), page.request.arg("q")
    query = narrowed(query_of(page, text), action)
    return page.render(
        "bulk_new.html",
        title=_TITLES[action],
        still=True,
        name=action,
        action=ACTIONS[action],
        query=query,
        survey=survey(page.mill, query, 5.0 if page.request.arg("count") else _PATIENCE),
        rates=RATES,
        first=page.request.arg("first"),
    )


@routes.post("/bulk", Role.OPERATOR)
def start_bulk(page: Page) -> Response:
    request = page.request
    action = _action(request.field("act"))
    page.need(ACTIONS[action].role)
    bulk = Bulk(
        id=new_id(),
        action=action,
        query=str(narrowed(query_of(page, request.field("q")), action)),
        target=target_of(request, action),
        who=page.user.name,
        rate=_number("rate", request.field("rate", "0"), 100_000),
        first=_number("first", request.field("first") or "0", _FIRST_MOST),
        expected=_number("expected", request.field("expected", "0"), 1 << 40),
    )
    bulk.first = bulk.first if action == "retry" else 0
    start(page.mill, bulk)
    page.dashboard.looks.forget()
    return page.redirect(page.url("/bulk/{}", bulk.id))


@routes.get("/bulk/{bulk_id}")
def show(page: Page, bulk_id: str) -> Response:
    one = get(page.mill, bulk_id)
    return page.render(
        "bulk_one.html",
        title=_TITLES[one.action],
        one=one,
        every=1 if one.state == "running" else 10,
    )


@routes.post("/bulk/{bulk_id}/stop", Role.OPERATOR)
def stop_bulk(page: Page, bulk_id: str) -> Response:
    one = get(page.mill, bulk_id)
    request_stop(page.mill, one)
    page.audit(f"stopped {one.what}", one.query, one.done)
    return page.redirect(page.url("/bulk/{}", bulk_id), "the operation stops after this piece")


@routes.post("/bulk/{bulk_id}/resume", Role.OPERATOR)
def resume_bulk(page: Page, bulk_id: str) -> Response:
    one = get(page.mill, bulk_id)
    page.need(Role.ADMIN if one.action == "restore" else ACTIONS[one.action].role)
    resume(page.mill, one)
    page.audit(f"resumed {one.what}", one.query, one.done)
    return page.redirect(page.url("/bulk/{}", bulk_id), "the operation goes on")


@routes.post("/bulk/{bulk_id}/forget", Role.OPERATOR)
def forget_bulk(page: Page, bulk_id: str) -> Response:
    forget(page.mill, get(page.mill, bulk_id))
    return page.redirect(page.url("/bulk"), "deleted; the audit list still has the operation")


def _action(name: str) -> str:
    if name not in ACTIONS:
        raise InvalidOption(f"choose an action: {', '.join(ACTIONS)}")
    return name


def _number(field: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) <= most):
        raise InvalidOption(f"{field} must be a whole number up to {most:,}, not {text[:20]!r}")
    return int(text)
