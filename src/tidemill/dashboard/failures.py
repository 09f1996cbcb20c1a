"""The page of failures: one row for each failure of the code, with its times and its jobs."""

from __future__ import annotations

import collections
import time

import msgspec
from starlette.responses import Response

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic.notes import Notes
from tidemill.client.history import FailureNumbers
from tidemill.core.clock import clock
from tidemill.core.fingerprint import FailureSample
from tidemill.core.job import Record
from tidemill.dashboard.job_search import failure_in, pages_of, parse, query_text
from tidemill.dashboard.jobs import RETRY_FIRST
from tidemill.dashboard.page import NotFound, Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.dashboard.windows import WINDOWS, Window, failures, window
from tidemill.errors import InvalidOption

routes = Routes()

_PATIENCE = 0.08
_SHOWN = 100


class Kept(msgspec.Struct):
    """The failed jobs that the store keeps, by fingerprint and task."""

    jobs: dict[tuple[str, str], list[Record]]
    is_exact: bool


class Failing(msgspec.Struct, frozen=True):
    """A failure, as a row of the page."""

    numbers: FailureNumbers
    kept: int  # its failed jobs that a short search of the store has found
    rate: int  # failed attempts in the last hour
    is_new: bool  # only the latest release has had the failure in the last 7 days
    muted: bool  # a user muted the failure, and it has not changed since
    change: str  # how the failure changed since it was muted
    query: str  # the search for its failed jobs


@routes.get("/failed")
def failed(page: Page) -> Response:
    over = window(page)
    kept = kept_jobs(page)
    rows = failing(page, over, kept)
    only_new = bool(page.request.arg("new"))
    if only_new:
        rows = [row for row in rows if row.is_new]
    return page.render(
        "failures.html",
        title="Failed",
        over=over,
        rows=[row for row in rows if not row.muted][:_SHOWN],
        muted=[row for row in rows if row.muted],
        hidden=max(0, len(rows) - _SHOWN),
        kept=sum(map(len, kept.jobs.values())),
        kept_exact=kept.is_exact,
        latest=latest_release(page),
        only_new=only_new,
        first=RETRY_FIRST,
    )


def latest_release(page: Page) -> str | None:
    """The release of the latest deploy; None before the second deploy."""
    if not page.has(Feature.HISTORY):
        return None
    deploys = page.cached("deploys", 2.0, page.mill.history.deploys)
    return deploys[-1].release if len(deploys) > 1 else None


def kept_jobs(page: Page) -> Kept:
    """The failed jobs that a short search of the store finds."""
    until = time.monotonic() + _PATIENCE
    found: dict[tuple[str, str], list[Record]] = collections.defaultdict(list)
    for records, cursor in pages_of(page.mill, parse("state:failed")):
        for record in records:
            found[failure_in(record).fingerprint, record.envelope.task].append(record)
        if cursor and time.monotonic() > until:
            return Kept(found, False)
    return Kept(found, True)


def failing(page: Page, over: Window, kept: Kept) -> list[Failing]:
    """The failures of a window, and older failures with kept jobs; the most frequent first."""
    known, silent, rates, latest = failures(page, over), {}, {}, latest_release(page)
    longest = failures(page, WINDOWS[-1])
    before = {(one.fingerprint, one.task) for one in longest if one.releases != (latest,)}
    if page.has(Feature.HISTORY):
        counted = failures(page, WINDOWS[0])
        rates = {(one.fingerprint, one.task): one.count for one in counted}
        silent = mutes(page.mill)
    names = {(one.fingerprint, one.task) for one in known}
    hour_ago = clock.wall() - WINDOWS[0].seconds
    older = [_numbers(*name, jobs) for name, jobs in kept.jobs.items() if name not in names]
    rows = []
    for one in [*known, *older]:
        name = one.fingerprint, one.task
        jobs = kept.jobs.get(name, [])
        lately = sum(record.finished >= hour_ago for record in jobs)
        rate = max(rates.get(name, 0), lately)  # no worker counts a job lost with its process
        note = silent.get(name)
        change = change_of(note, one, rate) if note is not None else ""
        rows.append(
            Failing(
                numbers=one,
                kept=len(jobs),
                rate=rate,
                is_new=one.releases == (latest,) and name not in before,
                muted=note is not None and not change,
                change=change,
                query=query_text(state="failed", task=one.task, failure=one.fingerprint),
            )
        )
    return rows


def _numbers(fingerprint: str, task: str, jobs: list[Record]) -> FailureNumbers:
    """The numbers of a failure without rows of history, from its kept jobs."""
    latest, ends = jobs[0], [record.finished for record in jobs]
    last = latest.attempts[-1] if latest.attempts else None
    one = failure_in(latest)
    what = {"error": one.error, "message": one.message, "place": one.place}
    sample = FailureSample(
        **what,
        traceback=last.traceback[-2000:] if last is not None else "",
        job=latest.envelope.id,
        queue=latest.envelope.queue,
        task=task,
        worker=last.worker if last is not None else "",
        time=max(ends),
    )
    return FailureNumbers(
        **what,
        fingerprint=fingerprint,
        task=task,
        failed=len(jobs),
        retried=0,
        first=min(ends),
        last=max(ends),
        releases=(),
        hosts=(),
        sample=sample,
    )


def _found(page: Page, fingerprint: str) -> Failing:
    task = page.request.field("task") or page.request.arg("task")
    for row in failing(page, WINDOWS[-1], kept_jobs(page)):
        if row.numbers.fingerprint == fingerprint and row.numbers.task == task:
            return row
    raise NotFound(f"no failure {fingerprint[:40]} of task {task[:80]} in the last 7 days")


@routes.post("/failed/{fingerprint}/mute", Role.OPERATOR)
def mute_failure(page: Page, fingerprint: str) -> Response:
    row = _found(page, fingerprint)
    mute(page.mill, row.numbers, row.rate, page.user.name)
    page.audit("muted failure", f"{row.numbers.task}: {row.numbers.error}")
    text = "muted until a new release has it, or it comes more often"
    return page.back(text, "/failed")


@routes.post("/failed/{fingerprint}/unmute", Role.OPERATOR)
def unmute_failure(page: Page, fingerprint: str) -> Response:
    task = page.request.field("task")
    if not fingerprint.isalnum():
        raise InvalidOption("a fingerprint consists of letters and digits")
    unmute(page.mill, fingerprint, task)
    page.audit("unmuted failure", task)
    return page.back("the failure is shown again", "/failed")


_OFTENER = 3.0
_LEAST_RATE = 10.0  # failures an hour; a lower rate never counts as a change


class Mute(msgspec.Struct, frozen=True):
    """A muted failure, with its numbers when it was muted. ``rate`` is in failures an hour."""

    fingerprint: str
    task: str
    releases: tuple[str, ...]
    rate: float
    who: str
    at: float


def mutes(mill: Tidemill) -> dict[tuple[str, str], Mute]:
    """All muted failures, by fingerprint and task."""
    found = [msgspec.json.decode(note.body, type=Mute) for note in _kept(mill).list()]
    return {(one.fingerprint, one.task): one for one in found}


def mute(mill: Tidemill, failure: FailureNumbers, rate: float, who: str) -> None:
    """Mute a failure until it changes."""
    note = Mute(failure.fingerprint, failure.task, failure.releases, rate, who, clock.wall())
    _kept(mill).put(_name(failure.fingerprint, failure.task), msgspec.json.encode(note))


def unmute(mill: Tidemill, fingerprint: str, task: str) -> None:
    if note := _kept(mill).get(_name(fingerprint, task)):
        _kept(mill).delete(note)


def _kept(mill: Tidemill) -> Notes:
    return Notes(mill.broker, "mute", "mute")


def _name(fingerprint: str, task: str) -> str:
    return f"{fingerprint} {task}"


def change_of(one: Mute, failure: FailureNumbers, rate: float) -> str:
    """How a muted failure has changed; empty while it has not."""
    new = [release for release in failure.releases if release not in one.releases]
    if new:
        return (
            f"it is new in {', '.join(release or 'workers without a release' for release in new)}"
        )
    if rate > max(_LEAST_RATE, _OFTENER * one.rate):
        return f"it came {one.rate:.0f} times an hour when it was muted, and now {rate:.0f}"
    return ""
