"""The report of the demo: the sums of all results, and an account of all executions."""

from __future__ import annotations

import collections
import os
from typing import Any

import msgspec

from tidemill.core.job import Outcome, Record, State
from tidemill.demo.ledger import Account

_SLOWEST = 5


class Report(msgspec.Struct, kw_only=True):
    """The demo in numbers.

    Attributes:
        jobs: the number of jobs for the folder as it is now.
        late_ms: milliseconds from the due time of the delayed job to its start.
        executions: all executions in all runs of the demo, also for files that have changed since
            or are gone. ``ran`` executions were the first of a job, ``retried`` followed an error,
            and ``interrupted`` were repeated after a kill.
        redone: the ids of jobs that ran again although they had finished; must be empty.
    """

    folder: str
    jobs: int
    files: int
    bytes: int
    lines: int
    words: int
    images: int
    pixels: int
    slowest: list[dict[str, Any]]
    duplicates: list[list[str]]
    failed: list[dict[str, str]]
    late_ms: float | None
    timed_out: str
    unfinished: int
    left_out: int
    ran: int
    executions: int
    retried: int
    interrupted: int
    redone: list[str]
    done_before: int
    seconds: float

    @property
    def good(self) -> bool:
        """True when all jobs have finished, and no finished job ran again."""
        return not self.redone and not self.unfinished


def make_report(
    folder: str,
    files: dict[str, Record | None],
    others: list[Record],
    account: Account,
    **more: Any,
) -> Report:
    """Add up the jobs of the files, by id, and account for every execution in the ledger.

    ``others`` are the records of all other jobs of the store: the delayed job, the job that times
    out, and jobs of files that have changed since.
    """
    records = [record for record in files.values() if record is not None]
    done = [(r, r.result) for r in records if r.state is State.SUCCEEDED]
    results = [result for _, result in done]
    by_digest: dict[str, list[str]] = collections.defaultdict(list)
    for result in results:
        if result["bytes"]:
            by_digest[result["sha256"]].append(os.path.relpath(result["path"], folder))
    sizes = [result["image"] for result in results if result["image"]]
    slowest = sorted(((_seconds(r), result["path"]) for r, result in done), reverse=True)
    retried = sum(_failures(r) for r in [*records, *others])
    special = {r.envelope.id: r for r in others}
    late, timed_out = special.get("delayed"), special.get("times-out")
    unfinished = [r for r in [*files.values(), late, timed_out] if not (r and r.state.finished)]
    return Report(
        folder=folder,
        jobs=len(files) + 2,
        files=len(results),
        **{name: sum(r[name] for r in results) for name in ("bytes", "lines", "words")},
        images=len(sizes),
        pixels=sum(width * height for width, height in sizes),
        slowest=[
            {"path": os.path.relpath(path, folder), "seconds": round(seconds, 4)}
            for seconds, path in slowest[:_SLOWEST]
        ],
        duplicates=sorted(paths for paths in by_digest.values() if len(paths) > 1),
        failed=[
            {"job": r.envelope.id, "error": r.error} for r in records if r.state is State.FAILED
        ],
        late_ms=late.result if late and late.state is State.SUCCEEDED else None,
        timed_out=timed_out.error if timed_out else "",
        unfinished=len(unfinished),
        ran=len(account.runs),
        executions=account.executions,
        retried=retried,
        interrupted=max(0, account.executions - len(account.runs) - retried),
        redone=account.redone,
        **more,
    )


def _seconds(record: Record) -> float:
    """The seconds that the last attempt took."""
    last = record.attempts[-1] if record.attempts else None
    return last.ended - last.started if last else 0.0


def _failures(record: Record) -> int:
    """The number of attempts that ended with an error of the task and were retried."""
    return sum(
        attempt.outcome == Outcome.RETRY and "Error: " in attempt.error
        for attempt in record.attempts
    )


def print_report(report: Report) -> None:
    """Print the report for people on stdout."""
    from tidemill.cli.console import clean, console
    from tidemill.doctor.words import duration, size

    out = console()
    dup = sum(len(paths) - 1 for paths in report.duplicates)
    late = ""
    if report.late_ms is not None:
        late = f"started {duration(report.late_ms / 1000)} after its time"
    lines = [
        ("files", f"{report.files:,} with {size(report.bytes)}"),
        ("text", f"{report.lines:,} lines, {report.words:,} words"),
        ("images", f"{report.images:,} with {report.pixels / 1e6:,.1f} million pixels"),
        ("doubles", f"{dup:,} files have the same content as another"),
        *(("slowest", f"{duration(row['seconds'])}  {row['path']}") for row in report.slowest[:3]),
        ("delayed", late),
        ("timed out", report.timed_out),
        *(("failed", f"{row['job']}: {row['error']}") for row in report.failed[:5]),
        (
            "left out",
            f"{report.left_out:,} files whose names are no text" if report.left_out else "",
        ),
        ("", ""),
        ("runs", f"{report.executions:,} executions of {report.ran:,} jobs in all runs so far"),
        ("", f"{report.retried:,} were retries, {report.interrupted:,} repeated after a kill"),
        ("", f"{report.done_before:,} of the {report.jobs:,} jobs had finished before this run"),
        ("redone", f"{len(report.redone):,} of the jobs that had finished ran again"),
    ]
    before = None
    for name, text in lines:
        if text:
            shown = "" if name == before else name
            out.print(f"{shown:<10} {clean(text, one_line=True)}")
        elif not name:
            out.print()
        before = name
