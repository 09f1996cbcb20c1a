"""How handles look in a notebook, and a progress bar for many jobs in terminals and notebooks.

A notebook shows a table for a job, a group or a queue, and the chart of a queue. It shows the state
of the handle at the moment when the cell runs.
"""

from __future__ import annotations

import datetime as dt
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tidemill.brokers.contract.inspection import QueueStats
from tidemill.client.history import QueueNumbers
from tidemill.core.clock import clock
from tidemill.core.job import Record
from tidemill.core.words import counted
from tidemill.errors import InvalidOption, TidemillError

if TYPE_CHECKING:
    from rich.progress import Progress


LINES_MOST = 10  # the most failures that have a line above a progress bar
TRACEBACKS_MOST = 3  # the most tracebacks below a progress bar that has ended

_TEXT_MOST = 2000
_LEFT = 'style="text-align:left"'


def html_table(handle: object, read: Callable[[], dict[str, str]]) -> str:
    """The facts of a handle as a table; its text when the store cannot be read."""
    import html

    try:
        facts = read()
    except (TidemillError, OSError) as error:
        return f"<code>{html.escape(repr(handle))}</code> <small>{html.escape(str(error))}</small>"
    lines = [
        f"<tr><th {_LEFT}>{name}</th><td {_LEFT}>{html.escape(text[:_TEXT_MOST])}</td></tr>"
        for name, text in facts.items()
        if text
    ]
    return f"<table>{''.join(lines)}</table>"


def job_facts(record: Record, end: Record) -> dict[str, str]:
    envelope, most = record.envelope, record.max_attempts
    done, total = record.progress or ("", 0)
    succeeded = record.state.value == "succeeded" and record.raw_result
    return {
        "job": envelope.id,
        "task": f"{envelope.task}({envelope.text})" if envelope.task else "message",
        "state": str(end.state),
        "queue": envelope.queue,
        "attempts": f"{record.current_attempt} of {most}" if most else str(record.current_attempt),
        "progress": f"{done} of {total}" if total else str(done),
        "doing": record.progress_text,
        "error": end.latest_error,
        "created": _ago(envelope.created),
        "finished": _ago(record.finished),
        "result": repr(record.result) if succeeded else "",
    }


def queue_facts(rows: Iterable[QueueStats], name: str) -> dict[str, str]:
    """What a notebook shows of a queue; ``rows`` are the queues of the store."""
    row = next((row for row in rows if row.name == name), QueueStats(name=name))
    names = ("ready", "running", "scheduled", "waiting", "succeeded", "failed")
    counts = {name: f"{getattr(row, name):,}" for name in names if name not in row.unknown}
    paused = " (paused)" if row.paused else ""
    return {"queue": name + paused, **counts, "oldest ready": _ago(row.oldest)}


def _ago(moment: float) -> str:
    gone = max(0, round(clock.wall() - moment))
    return f"{dt.timedelta(seconds=gone)} ago" if moment else ""


def plot(numbers: QueueNumbers, ax: Any) -> Any:
    """Draw the history of a queue with matplotlib; as ``Queue.plot``."""
    try:
        plt: Any = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        raise InvalidOption("plot() needs matplotlib: pip install matplotlib") from None
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 3))
    at = [dt.datetime.fromtimestamp(point.at) for point in numbers.points]
    for name in ("accepted", "succeeded", "failed"):
        ax.plot(at, [getattr(point, name) for point in numbers.points], label=name)
    unit = "minute" if numbers.span == 60 else "hour"
    ax.set(title=f"queue {numbers.queue}", ylabel=f"jobs a {unit}", ylim=(0, None))
    ax.legend(loc="upper left")
    ax.figure.autofmt_xdate()
    return ax


class Bar:
    """The numbers of ended and failed jobs, in a row of ``rows`` if the bar is visible.

    Attributes:
        told: ids of the jobs whose failures have a line above a visible bar.
    """

    def __init__(self, total: int | None, rows: Progress | None = None) -> None:
        self.shown = rows is not None
        self.told = set[str]()
        self._tracebacks: dict[str, str] = {}  # by the lines of code in them
        self._total, self._done, self._failed = total, 0, 0
        self._rows = rows
        if rows is not None:
            self._row = rows.add_task("", total=total)
            self.move(0, 0)

    def step(self, failed: Record | None, *, good: bool) -> None:
        """Count one more ended job, which may have no record any more."""
        self.move(self._done + 1, self._failed + (not good))
        if failed is not None and not good:
            self.tell([failed])

    def tell(self, failed: Iterable[Record]) -> None:
        """Show each failure as one line above a visible bar; of many failures the first ones."""
        for record in failed:
            job_id = record.envelope.id
            if self._rows is None or job_id in self.told or len(self.told) >= LINES_MOST:
                continue
            self.told.add(job_id)
            text = f"{record.envelope.task} {job_id} {record.state}: {record.latest_error}"
            line = _printable(text)[: self._rows.console.width - 1]
            self._rows.console.out(line, highlight=False)
            if trace := record.latest_traceback:
                lines = [*map(_printable, trace.splitlines())]
                code = "".join(line for line in lines if line.startswith('  File "'))
                self._tracebacks.setdefault(code, "\n".join(lines))

    def move(self, done: int, failed: int, total: int | None = None) -> None:
        """Set the numbers of ended jobs and of failed jobs."""
        self._done, self._failed, self._total = done, failed, total or self._total
        if self._rows is not None:
            of = "" if self._total is None else f" of {self._total}"
            text = f"{done}{of} ended" + (f", {failed} failed" if failed else "")
            self._rows.update(self._row, completed=done, total=self._total, description=text)

    def end(self) -> None:
        """Show the first different tracebacks below the bar, and the number of other failures."""
        shown = [*self._tracebacks.values()][:TRACEBACKS_MOST]
        if self._rows is not None and shown:
            more = self._failed - len(shown)
            last = [f"{counted(more, 'more job')} failed"] if more > 0 else []
            self._rows.console.out("", "\n\n".join([*shown, *last]), sep="\n", highlight=False)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


@contextmanager
def open_bar(total: int | None, *, show: bool) -> Iterator[Bar]:
    """A bar for the block. ``show`` makes it visible in terminals and notebooks."""
    rows = _rows() if show else None
    if rows is None:
        yield Bar(total)
        return
    bar = Bar(total, rows)
    try:
        with rows:
            try:
                yield bar
            finally:
                rows.refresh()  # rich itself shows no last state in a notebook
    finally:
        bar.end()


def _rows() -> Progress | None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    out = Console(stderr=True)  # stdout may go into a pipe
    if not (out.is_jupyter or out.file.isatty()):
        return None
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=out)
