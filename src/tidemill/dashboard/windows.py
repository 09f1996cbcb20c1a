"""The period before now that a page shows, and its history."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from tidemill.brokers.contract.features import Feature
from tidemill.client.history import FailureNumbers, QueueNumbers, Series, TaskNumbers
from tidemill.core.clock import clock
from tidemill.dashboard.page import TEMPLATES, Page

T = TypeVar("T")
Line = tuple[str, str, Sequence[float | None]]  # of a chart: name, name of its colour, values


class Window(NamedTuple):
    """A period that ends now: its name in URLs, its name for people, and its length in seconds.

    History reads up to 24 hours from rows by minute. So the window of a day is one second longer:
    history reads it from rows by hour, which is faster.
    """

    name: str
    title: str
    seconds: int
    keep: float  # seconds for which viewers share an answer

    @property
    def words(self) -> str:
        """The window in a sentence: ``the last hour``, ``the last 7 days``."""
        return f"the last {self.title.removeprefix('1 ')}"


WINDOWS = (
    Window("1h", "1 hour", 3600, 2.0),
    Window("24h", "24 hours", 86_401, 10.0),
    Window("7d", "7 days", 7 * 86_400, 30.0),
)
TEMPLATES.globals["windows"] = WINDOWS


def window(page: Page) -> Window:
    """The window that the URL of a page names with ``over=``; else the last hour."""
    name = page.request.arg("over")
    return next((one for one in WINDOWS if one.name == name), WINDOWS[0])


def known_seconds(page: Page, over: Window) -> float:
    """The part of a window in which the store existed, in seconds; at least 1.

    A store whose jobs moved here has history from before it was made. The first snapshot of a store
    counts in the minute or hour before it, so history is older only from two periods on.
    """
    begin = float(page.look.facts.get("made", 0.0))
    if (whole := queue_history(page, over).get("")) is not None:
        acted = (point.at for point in whole.points if point.accepted or point.succeeded)
        first = next(acted, clock.wall())
        begin = first if first + 2 * whole.span <= begin else begin
    return max(1.0, min(over.seconds, clock.wall() - begin))


def read(page: Page, over: Window, what: str, nothing: T, **options: Any) -> T:
    """What ``mill.history.<what>`` tells of a window; ``nothing`` without history."""
    if not page.has(Feature.HISTORY):
        return nothing
    make: Callable[..., T] = getattr(page.mill.history, what)
    call = functools.partial(make, over.seconds, **options)
    return page.cached((what, over.name, *options.items()), over.keep, call)


def totals(page: Page, over: Window, by: Sequence[str], task: str = "") -> list[TaskNumbers]:
    """How runs ended in a window, of one task or of all; empty without history."""
    found: list[TaskNumbers] = read(page, over, "tasks", [], task=task, by=tuple(by))
    seconds = known_seconds(page, over)
    return [msgspec.structs.replace(one, seconds=min(one.seconds, seconds)) for one in found]


def failures(page: Page, over: Window, task: str = "") -> list[FailureNumbers]:
    """The failures of a window, of one task or of all; empty without history."""
    return read(page, over, "failures", [], task=task)


def series(page: Page, over: Window, task: str = "", queue: str = "") -> Series | None:
    """The runs of a window by minute or hour; None without history."""
    return read(page, over, "series", None, task=task, queue=queue)


def queue_history(page: Page, over: Window) -> dict[str, QueueNumbers]:
    """The history of each queue by its name, and of all queues under the empty name."""
    if not page.has(Feature.INSPECT):
        return {}
    found: list[QueueNumbers] = read(page, over, "queues", [])
    return {one.queue: one for one in found}


def per_period(counts: Sequence[int], at: Sequence[int], span: int) -> list[float | None]:
    """Counts for a chart. The count of the current period is extrapolated to its full length.

    While less than a quarter of the current period is over, its count is None.
    """
    values: list[float | None] = [float(count) for count in counts]
    if values:
        gone = clock.wall() - at[-1]
        values[-1] = counts[-1] * span / gone if gone >= span / 4 else None
    return values


def percentiles(found: Series, what: str) -> dict[str, Any]:
    """The chart of the waits (``wait``) or of the times of runs (``run``)."""
    colors = {"p50": "ready", "p95": "running", "p99": "scheduled"}
    lines = [(name, color, getattr(found, f"{what}_{name}")) for name, color in colors.items()]
    return chart(found.at, lines, "s")


def chart(at: Sequence[int], lines: Sequence[Line], unit: str = "") -> dict[str, Any]:
    """The data of a chart. The unit ``s`` shows values as times."""
    drawn = [
        {"name": name, "color": color, "values": values, "fill": place == 0}
        for place, (name, color, values) in enumerate(lines)
    ]
    return {"at": at, "unit": unit, "lines": drawn}
