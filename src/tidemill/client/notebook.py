"""How handles look in a notebook: ``_repr_html_`` for jobs, groups and queues, and charts.

A notebook shows the state of the handle at the moment when the cell runs. Showing a handle never
raises: when the store cannot be read, the notebook shows the plain text of the handle.
"""

from __future__ import annotations

import datetime as dt
import html
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from tidemill.brokers.contract.inspection import QueueStats
from tidemill.client.history_numbers import QueueNumbers
from tidemill.client.runtime import Runtime
from tidemill.core.clock import clock
from tidemill.core.config import Seconds
from tidemill.core.errors import InvalidOption, TidemillError
from tidemill.core.job import Record

_COLORS = {
    "succeeded": "#2f9455",
    "failed": "#c2413a",
    "running": "#2f6fbf",
    "ready": "#1f8a94",
    "cancelled": "#9a7b1e",
    "expired": "#a3651b",
}
_OTHER = "#7b62a8"
_TEXT_MOST = 2000


class _Job(Protocol):
    id: str

    def refresh(self) -> Record: ...


class _Group(Protocol):
    id: str

    @property
    def state(self) -> Any: ...
    @property
    def progress(self) -> tuple[int, int]: ...
    def count(self, *, failures: bool = False) -> int: ...


class JobInNotebook:
    """A handle on a job, in a notebook."""

    __slots__ = ()

    def _repr_html_(self: _Job) -> str:
        return _shown(self, lambda: _job_rows(self.refresh()))


class GroupInNotebook:
    """A handle on a group, in a notebook."""

    __slots__ = ()

    def _repr_html_(self: _Group) -> str:
        return _shown(self, lambda: _group_rows(self))


class _Queue(Protocol):
    name: str
    _mill: Runtime


class QueueInNotebook:
    """A queue, in a notebook."""

    __slots__ = ()

    def plot(self: _Queue, since: Seconds = 3600, *, ax: Any = None) -> Any:
        """Draw how many jobs came in, and how they ended, with matplotlib; return the axes.

        Args:
            since: seconds before now at which the chart begins.
            ax: axes of matplotlib to draw into; new ones by default.

        Raises:
            FeatureMissing: the broker keeps no history.
            InvalidOption: matplotlib is not installed.
        """
        found = self._mill.history.queues(since, queue=self.name)
        return _plot(found[0] if found else QueueNumbers(self.name, 60, []), ax)

    def _repr_html_(self: _Queue) -> str:
        return _shown(self, lambda: _queue_rows(_stats_of(self)))


def _stats_of(queue: _Queue) -> QueueStats:
    rows = [row for row in queue._mill.broker.stats() if row.name == queue.name]
    return rows[0] if rows else QueueStats(name=queue.name)


def _shown(handle: object, rows: Callable[[], Iterable[tuple[str, str]]]) -> str:
    """Rows of (name, HTML) as a table; the text of the handle when the store cannot be read."""
    try:
        cells = list(rows())
    except (TidemillError, OSError) as error:
        return f"<code>{html.escape(repr(handle))}</code> <small>{html.escape(str(error))}</small>"
    lines = [
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{value}</td></tr>'
        for name, value in cells
        if value
    ]
    return f"<table>{''.join(lines)}</table>"


def _job_rows(record: Record) -> Iterable[tuple[str, str]]:
    envelope, progress = record.envelope, record.progress
    name = f"{envelope.task}({envelope.text})" if envelope.task else "message"
    yield "job", f"<code>{html.escape(envelope.id)}</code>"
    yield "task" if envelope.task else "kind", html.escape(name)
    yield "state", _state(str(record.state))
    yield "queue", html.escape(envelope.queue)
    most = f" of {record.max_attempts}" if record.max_attempts else ""
    yield "attempts", f"{record.current_attempt}{most}"
    yield "progress", _bar(*progress) if progress else ""
    yield "doing", html.escape(record.progress_text[:_TEXT_MOST])
    yield "error", html.escape(record.latest_error[:_TEXT_MOST])
    yield "created", _ago(envelope.created)
    yield "finished", _ago(record.finished)
    if record.state.value == "succeeded" and record.raw_result:
        yield "result", f"<code>{html.escape(repr(record.result)[:_TEXT_MOST])}</code>"


def _group_rows(group: _Group) -> Iterable[tuple[str, str]]:
    ended, count = group.progress
    failures = group.count(failures=True)
    yield "group", f"<code>{html.escape(group.id)}</code>"
    yield "state", _state(str(group.state))
    yield "ended", _bar(ended, count)
    yield "without success", f"{failures:,}" if failures else ""


def _queue_rows(row: QueueStats) -> Iterable[tuple[str, str]]:
    yield "queue", html.escape(row.name) + (" (paused)" if row.paused else "")
    for name in ("ready", "running", "scheduled", "waiting", "succeeded", "failed"):
        if name not in row.unknown:
            yield name, f"{getattr(row, name):,}"
    yield "oldest ready", _ago(row.oldest)


def _state(name: str) -> str:
    return f'<b style="color:{_COLORS.get(name, _OTHER)}">{html.escape(name)}</b>'


def _bar(done: int, total: int) -> str:
    if not total:
        return f"{done:,}"
    return f'<progress value="{done}" max="{total}"></progress> {done:,} of {total:,}'


def _ago(moment: float) -> str:
    if not moment:
        return ""
    gone = max(0, round(clock.wall() - moment))
    return f"{dt.timedelta(seconds=gone)} ago"


def _plot(numbers: QueueNumbers, ax: Any = None) -> Any:
    """Draw how many jobs entered a queue, and how they ended, with matplotlib; return the axes.

    Raises:
        InvalidOption: matplotlib is not installed.
    """
    try:
        plt: Any = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        raise InvalidOption("plot() needs matplotlib: pip install matplotlib") from None
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 3))
    at = [dt.datetime.fromtimestamp(point.at) for point in numbers.points]
    lines: Sequence[tuple[str, str]] = (
        *(("accepted", _COLORS["ready"]), ("succeeded", _COLORS["succeeded"])),
        ("failed", _COLORS["failed"]),
    )
    for name, color in lines:
        ax.plot(at, [getattr(point, name) for point in numbers.points], label=name, color=color)
    unit = "minute" if numbers.span == 60 else "hour"
    ax.set(title=f"queue {numbers.queue}", ylabel=f"jobs a {unit}", ylim=(0, None))
    ax.legend(loc="upper left")
    ax.figure.autofmt_xdate()
    return ax
