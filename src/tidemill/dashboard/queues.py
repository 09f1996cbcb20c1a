"""The pages of queues: their depth, rates, workers and limits, and the actions on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.responses import Response

from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, MINUTE
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.brokers.generic.purges import WHY_LEFT, list_purges
from tidemill.brokers.generic.purges import purge as purge_jobs
from tidemill.brokers.generic.purges import restore as restore_jobs
from tidemill.client.history import ALL_QUEUES, QueueNumbers, QueuePoint, TaskNumbers, latest_of
from tidemill.core.job import Owner
from tidemill.core.words import counted
from tidemill.dashboard import bulk
from tidemill.dashboard.overview import has_tasks, worker_command
from tidemill.dashboard.page import NotFound, Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.dashboard.windows import (
    WINDOWS,
    chart,
    known_seconds,
    per_period,
    percentiles,
    queue_history,
    series,
    totals,
    window,
)
from tidemill.errors import InvalidOption
from tidemill.limits.arithmetic import LimitStats
from tidemill.limits.declare import rate_text, terms_text

routes = Routes()

_RATE_OVER = 5  # whole minutes, besides the current one, over which rates are counted
_LATELY = 60.0 * (_RATE_OVER + 1)  # seconds without history after which the trend is unknown
_TREND = 20.0  # seconds after which a change of the ready jobs tells whether a queue shrinks
_MOST_SHOWN = 200
_RESTORED_AT_ONCE = 1000  # the most jobs that a request restores; more go to the background
_PURGES_SHOWN = 20
_SORTS = ("ready", "running", "failed", "name")


class QueueRow(NamedTuple):
    """A queue as its page shows it. A value that the broker does not know is None."""

    stats: QueueStats
    workers: list[Owner]
    came: float | None = None  # jobs per second
    went: float | None = None  # jobs per second
    over: float = 0.0  # seconds over which these rates are counted
    empty_in: float | None = None  # seconds; infinite for a queue that does not empty
    grows: bool = False  # more jobs come than go
    numbers: TaskNumbers | None = None
    depths: list[int] = []  # noqa: RUF012 - never changed
    is_unserved: bool = False  # ready jobs of tasks have no worker

    @property
    def line(self) -> str:
        """The path of the depths in the last hour, for a small chart."""
        return spark(self.depths)

    @property
    def slots(self) -> int:
        """Jobs that the workers of the queue can run at a time."""
        return sum(owner.concurrency for owner in self.workers)


@routes.get("/queues")
def index(page: Page) -> Response:
    sort = page.request.arg("sort", "ready")
    if sort not in _SORTS:
        raise InvalidOption(f"sort must be one of {', '.join(_SORTS)}, not {sort[:50]!r}")
    text = page.request.arg("name").strip()
    found = [row for row in page.look.queues if text.lower() in row.name.lower()]
    if sort == "name":
        found.sort(key=lambda row: row.name)
    else:
        found.sort(key=lambda row: (-getattr(row, sort), row.name))
    return page.render(
        "queues.html",
        title="Queues",
        rows=_rows(page, found[:_MOST_SHOWN]),
        text=text,
        sort=sort,
        matching=len(found),
        unpaused=sum(not row.paused for row in page.look.queues),
        paused=sum(row.paused for row in page.look.queues),
    )


@routes.get("/queues/{name}")
def show(page: Page, name: str) -> Response:
    stats = _stats(page, name)
    over = window(page)
    [row] = _rows(page, [stats])
    limit = _limits(page).get(name)
    return page.render(
        "queue.html",
        title=f"Queue {name}",
        row=row,
        limit=limit,
        limit_text=terms_text(limit.terms) if limit else "",
        rate=rate_text(limit.terms.rate) if limit and limit.terms.rate else "",
        over=over,
        charts=_charts(page, name),
        command=worker_command(page, name),
        purgeable=stats.size - stats.running,
        purges=list_purges(page.mill.broker, name)[:_PURGES_SHOWN],
    )


def _stats(page: Page, name: str) -> QueueStats:
    stats = page.look.queue(name) or page.dashboard.looks.take(0).queue(name)  # may be new
    if stats is None:
        raise NotFound(f"there is no queue {name[:200]!r}")
    return stats


def _limits(page: Page) -> dict[str, LimitStats]:
    if not page.has(Feature.LIMITS):
        return {}
    rows = page.cached("limits", 1.0, page.mill.limits.list)
    return {row.name: row for row in rows if row.queue}


def _rows(page: Page, found: list[QueueStats]) -> list[QueueRow]:
    history = queue_history(page, WINDOWS[0])
    numbers = {one.queue: one for one in totals(page, WINDOWS[0], ("queue",))}
    return [_row(page, stats, history.get(stats.name), numbers.get(stats.name)) for stats in found]


def _row(
    page: Page, stats: QueueStats, history: QueueNumbers | None, numbers: TaskNumbers | None
) -> QueueRow:
    workers = page.look.serving(stats.name)
    lacking = bool(page.has(Feature.INSPECT) and stats.ready and not workers)
    bare = QueueRow(
        stats, workers, numbers=numbers, is_unserved=lacking and has_tasks(page, stats.name)
    )
    if history is None or not history.points:
        return bare
    seen = _seen(page, stats, history.points)
    came, went, over = _rates(page, stats, history.points, seen)
    depths = [point.ready for point in history.points]
    bare = bare._replace(came=came, went=went, over=over, depths=depths)
    if page.look.at - seen > _LATELY:
        return bare
    shrinks = _shrinks(page, stats, history.points, seen)
    if shrinks is None:  # the numbers of jobs that came and went tell
        shrinks = went - came
    empty_in = stats.ready / shrinks if shrinks > 0 else float("inf")
    return bare._replace(empty_in=empty_in if stats.ready else None, grows=shrinks < 0)


def _seen(page: Page, stats: QueueStats, points: list[QueuePoint]) -> float:
    """The end of the last minute in the history; the present if nothing has changed since then.

    A minute in which no worker or server acts has no row. Its point only repeats the last states,
    and its jobs count in the current minute.
    """
    now, last = page.look.at, points[-1]
    if not (last.accepted or _ended(last) or last.ready != points[-2].ready):
        return now
    history = with_history(page.mill.broker, "the dashboard")
    latest = page.cached(
        "latest rows", WINDOWS[0].keep, lambda: latest_of(history.history("queue", ALWAYS, 0, 1))
    )
    rows = [latest[name] for name in (stats.name, ALL_QUEUES) if name in latest]
    made = now - known_seconds(page, WINDOWS[0])
    return max([made, *(row.at + MINUTE for row in rows)])


def _rates(
    page: Page, stats: QueueStats, points: list[QueuePoint], seen: float
) -> tuple[float, float, float]:
    """Jobs per second that came and that went lately, and the seconds over which they are counted.

    The store existed in this time. Jobs that came before the history began count in its first
    minute. So the time begins at least with the oldest ready job. It also begins at the latest at
    the end of the last minute in the history.
    """
    recent, now = points[-_RATE_OVER - 1 :], page.look.at
    accepted = sum(point.accepted for point in recent)
    begin = min(seen, max(recent[0].at, now - known_seconds(page, WINDOWS[0])))
    if stats.oldest and accepted >= stats.accepted:
        begin = min(begin, stats.oldest)
    seconds = max(1.0, now - begin)
    return accepted / seconds, sum(_ended(point) for point in recent) / seconds, seconds


def _shrinks(page: Page, stats: QueueStats, points: list[QueuePoint], seen: float) -> float | None:
    """By how many ready jobs a second a queue shrinks now; negative for a queue that grows.

    The function compares now with the end of a minute, 20 to 80 seconds ago, or of the last minute
    in the history. None without such a minute, or if the number is the same.
    """
    now, span = page.look.at, MINUTE
    until = min(seen, now - _TREND)
    before = next((p for p in reversed(points[:-1]) if p.at + span <= until), None)
    if before is None or before.ready == stats.ready:
        return None
    return (before.ready - stats.ready) / (now - before.at - span)


def _ended(point: QueuePoint) -> int:
    return point.succeeded + point.failed + point.cancelled + point.expired + point.purged


def _charts(page: Page, name: str) -> list[dict[str, Any]]:
    over = window(page)
    history = queue_history(page, over).get(name)
    found = series(page, over, queue=name)
    if history is None or found is None:
        return []
    at, unit = [point.at for point in history.points], "minute" if history.span == 60 else "hour"
    flows = [
        ("in", "running", [point.accepted for point in history.points]),
        ("out", "succeeded", [_ended(point) for point in history.points]),
    ]
    rates = [(text, color, per_period(counts, at, history.span)) for text, color, counts in flows]
    depths = [
        ("ready", "ready", [point.ready for point in history.points]),
        ("running", "running", [point.running for point in history.points]),
        ("scheduled", "scheduled", [point.scheduled for point in history.points]),
    ]
    return [
        {"id": "depth", "title": "Jobs in the queue", "data": chart(at, depths)},
        {"id": "flow", "title": f"Jobs in and out per {unit}", "data": chart(at, rates)},
        {"id": "waits", "title": "Wait until the first start", "data": percentiles(found, "wait")},
    ]


# -- actions ---------------------------------------------------------------------------------------


@routes.post("/queues/pause")
def pause_all(page: Page) -> Response:
    """Let no job of any queue start; a queue that appears later is not paused."""
    count = _set_all(page, paused=True)
    text = f"{counted(count, 'queue')} paused: running jobs go on, no other job starts."
    return page.back(text, "/queues")


@routes.post("/queues/resume")
def resume_all(page: Page) -> Response:
    count = _set_all(page, paused=False)
    return page.back(f"{counted(count, 'queue')} resumed.", "/queues")


def _set_all(page: Page, *, paused: bool) -> int:
    """Pause or resume the queues that are not in this state; returns their number."""
    names = [row.name for row in page.dashboard.looks.take(0).queues if row.paused != paused]
    done: list[str] = []
    try:
        for name in names:
            page.mill.broker.set_queue(name, paused=paused)
            done.append(name)
    finally:
        if done:
            what = f"{'paused' if paused else 'resumed'} all queues"
            page.audit(what, ", ".join(done), len(done))
    return len(names)


@routes.post("/queues/{name}/pause")
def pause(page: Page, name: str) -> Response:
    _stats(page, name)
    page.mill.broker.set_queue(name, paused=True)
    page.audit("paused queue", name)
    return page.back(f"Queue {name} is paused: running jobs go on, no other job starts.", "/queues")


@routes.post("/queues/{name}/resume")
def resume(page: Page, name: str) -> Response:
    _stats(page, name)
    page.mill.broker.set_queue(name, paused=False)
    page.audit("resumed queue", name)
    return page.back(f"Queue {name} goes on.", "/queues")


@routes.post("/queues/{name}/purge", role=Role.ADMIN)
def purge(page: Page, name: str) -> Response:
    """Delete all jobs of a queue that are neither running nor finished."""
    _stats(page, name)
    page.confirm(name)
    purged = purge_jobs(page.mill.broker, name, now=bool(page.request.field("now")))
    page.audit("purged queue", name, purged.jobs)
    text = f"{_jobs_were(purged.jobs)} deleted from queue {name}."
    if purged.kept < purged.jobs and page.has(Feature.INSPECT):
        text += f" {purged.kept:,} can be restored." if purged.kept else " They cannot be restored."
    return page.back(text, "/queues")


@routes.post("/queues/{name}/restore", role=Role.ADMIN)
def restore(page: Page, name: str) -> Response:
    _stats(page, name)
    page.mill.runtime.features.need(Feature.INSPECT, "restoring a purge")
    purge_id = page.request.field("purge")
    purges = {one.id: one for one in list_purges(page.mill.broker, name)}
    counts = [one.jobs for one in purges.values()]  # a restore reads the jobs of all purges
    if purge_id in purges and (0 in counts or sum(counts) > _RESTORED_AT_ONCE):
        one = bulk.start_restore(page.mill, purges[purge_id], page.user.name)
        return page.redirect(page.url("/bulk/{}", one.id))
    restored = restore_jobs(page.mill.broker, name, purge_id)
    page.audit("restored queue", name, restored.jobs)
    text = f"{_jobs_were(restored.jobs)} restored to queue {name}."
    if restored.left:
        text += f" {restored.left:,} stay purged: {WHY_LEFT}."
    return page.back(text, "/queues")


def _jobs_were(count: int) -> str:
    return "1 job was" if count == 1 else f"{count:,} jobs were"


@routes.post("/queues/{name}/bounds", role=Role.ADMIN)
def bounds(page: Page, name: str) -> Response:
    """Change the rate, the concurrency and the most jobs of a queue. Empty fields remove bounds."""
    _stats(page, name)
    form = page.request
    changes: dict[str, Any] = {}
    if "rate" in form.form_data:
        changes["rate"] = form.field("rate").strip() or None
    if "concurrency" in form.form_data:
        changes["concurrency"] = _whole("concurrency", form.field("concurrency"))
    if changes:
        page.mill.limits.set_queue(name, **changes)
    if "max_size" in form.form_data:
        page.mill.broker.set_queue(
            name, max_size=_whole("the most jobs", form.field("max_size")) or 0
        )
    text = ", ".join(f"{what} {value or 'none'}" for what, value in changes.items())
    page.audit("changed queue limits", f"{name}: {text}" if text else name)
    return page.back(f"The limits of queue {name} are changed, for all workers.", "/queues")


@routes.post("/queues/{name}/declared", role=Role.ADMIN)
def declared(page: Page, name: str) -> Response:
    _stats(page, name)
    page.mill.limits.reset_queue(name)
    page.audit("reset queue limits", name)
    return page.back(f"Queue {name} has the limits that the code declares.", "/queues")


def _whole(what: str, text: str) -> int | None:
    """A whole number from a form; None for an empty field."""
    text = text.strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidOption(f"{what} must be a whole number, or empty for none, not {text[:50]!r}")
    return int(text)


WIDTH, HEIGHT = 100, 24


def spark(values: Sequence[float]) -> str:
    """The path of a line through values. The bottom is 0, the top is the largest value."""
    if len(values) < 2:
        return ""
    most = max(values) or 1
    step = WIDTH / (len(values) - 1)
    points = [
        f"{place * step:.1f},{HEIGHT - value / most * (HEIGHT - 2):.1f}"
        for place, value in enumerate(values)
    ]
    return "M" + "L".join(points)
