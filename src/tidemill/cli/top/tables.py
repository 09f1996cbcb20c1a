"""The tables of ``tidemill top``: a snapshot as lines of text, for a terminal or for a pipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.cli import console
from tidemill.cli.top.snapshot import QueueRow, RunningJob, Snapshot, WorkerRow
from tidemill.core.clock import short_id
from tidemill.doctor.words import running_in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from tidemill.cli.console import Table

SORTS: dict[str, Callable[[QueueRow], Any]] = {
    "depth": lambda row: (-row.stats.size, row.stats.name),
    "oldest": lambda row: (row.stats.oldest or float("inf"), row.stats.name),
    "rate out": lambda row: (-(row.rates.out or 0.0), row.stats.name),
    "failures": lambda row: (-(row.rates.failed or 0.0), -row.stats.failed, row.stats.name),
    "name": lambda row: row.stats.name,
}
"""The orders of queues, by name."""

_TOTALS = ("ready", "running", "scheduled", "waiting", "failed")
_BARS = "▁▂▃▄▅▆▇█"


def sorted_queues(snapshot: Snapshot, sort: str) -> list[QueueRow]:
    """The queues in an order of :data:`SORTS`."""
    return sorted(snapshot.queues, key=SORTS[sort])


def headline(snapshot: Snapshot) -> str:
    """The totals of the store in one line."""
    totals = [(name, snapshot.totals[name]) for name in _TOTALS]
    known = [
        running_in_words(count, snapshot.fetched) if name == "running" else f"{count:,} {name}"
        for name, count in totals
        if count is not None
    ]
    rates = [row.rates for row in snapshot.queues if row.rates.out is not None]
    if rates or not snapshot.queues:
        into, out = sum(one.into or 0.0 for one in rates), sum(one.out or 0.0 for one in rates)
        known.append(f"in {_rate(into)}/s, out {_rate(out)}/s")
    if "workers" not in snapshot.missing:
        workers = [row.owner for row in snapshot.workers if row.owner.kind == "worker"]
        slots = sum(owner.concurrency for owner in workers)
        plural = "" if len(workers) == 1 else "s"
        known.append(f"{len(workers):,} worker{plural} with {slots:,} slots")
    return "   ".join(known)


def lacking(snapshot: Snapshot) -> str:
    """The line that names the numbers that a message broker does not know, and the remedy."""
    missing = ", ".join(snapshot.missing)
    return f"this broker cannot report {missing}; lmdb, redis, postgresql and django can"


def queues_table(out: Console, rows: Sequence[QueueRow]) -> Table:
    """A table of queues."""
    columns = (
        *("queue…", "ready#", "running#", "scheduled#?", "waiting#?", "oldest#"),
        *("in/s#", "out/s#", "fail/s#?", "rate out?", "note…"),
    )
    cells = [
        (
            row.stats.name,
            *(_number(row, name) for name in ("ready", "running", "scheduled", "waiting")),
            console.ago(row.stats.oldest),
            *(_rate(rate) for rate in (row.rates.into, row.rates.out, row.rates.failed)),
            _sparkline(row.rates.points),
            _note(row),
        )
        for row in rows
    ]
    return console.table(out, columns, cells)


def _number(row: QueueRow, name: str) -> str:
    if name in row.stats.unknown:
        return "-"
    if name == "running" and row.stats.running and row.fetched is None:
        return f"{row.stats.running:,} or fetched"
    if name == "running" and row.fetched:
        return f"{max(0, row.stats.running - row.fetched):,} + {row.fetched:,}"
    return f"{getattr(row.stats, name):,}"


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:,.0f}" if rate >= 9.95 or not rate else f"{rate:.1f}"


def _sparkline(points: Sequence[float]) -> str:
    """Rates as bars. The largest of these rates has the highest bar."""
    most = max(points, default=0.0) or 1.0
    return "".join(_BARS[round(point / most * 7)] for point in points)


def _note(row: QueueRow) -> Text | str:
    """The problem of a queue; else, on a message broker, the number of consumers."""
    if row.stats.paused:
        return console.styled("paused")
    if row.note:
        from rich.text import Text

        return Text(row.note, style="bold red")
    return f"{row.stats.consumers:,} consumers" if row.stats.unknown else ""


def jobs_table(out: Console, jobs: Sequence[RunningJob], *, selected: int = -1) -> Table:
    """A table of running jobs; ``selected`` is the index of the job to mark."""
    columns = ("id…", "task…", "queue?", "worker…?", "for#", "attempt#?", "progress")
    cells = [
        (
            short_id(job.id),
            job.task,
            job.queue,
            job.worker,
            console.ago(job.since),
            job.attempt,
            "waits for a slot" if job.waits else _progress(job),
        )
        for job in jobs
    ]
    table = console.table(out, columns, cells)
    table.marked = selected + 1
    return table


def _progress(job: RunningJob) -> str:
    if job.progress is None:
        return ""
    done, total = job.progress
    return f"{done / total:.0%} of {total:,}" if total else f"{done:,} done"


def workers_table(out: Console, workers: Sequence[WorkerRow]) -> Table:
    """A table of workers and consumers. ``busy`` is not known for a worker of another machine."""
    columns = ("worker…", "kind?", "queues…?", "busy#", "slots#", "up#?", "host?", "pid#?")
    cells = [
        (
            row.owner.name,
            row.owner.kind,
            ", ".join(row.owner.queues) or "all",
            "-" if row.busy is None else row.busy,
            row.owner.concurrency or "-",
            console.ago(row.owner.started),
            row.owner.host,
            row.owner.pid,
        )
        for row in workers
    ]
    return console.table(out, columns, cells)
