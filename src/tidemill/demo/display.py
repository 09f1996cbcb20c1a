"""The progress of the demo on stderr: a live bar on a terminal, else a line every 2 seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tidemill.brokers.contract.inspection import QueueStats

_LINE_EVERY = 2.0


class Counts(msgspec.Struct, frozen=True):
    """The numbers of jobs at one moment of the demo.

    ``running`` counts leased jobs, including jobs that a worker has leased and not started.
    ``left`` counts all unfinished jobs.
    """

    done: int = 0
    failed: int = 0
    retried: int = 0
    running: int = 0
    left: int = 0

    @classmethod
    def of(cls, rows: list[QueueStats]) -> Counts:
        """The sums over all queues, since the store was made."""
        return cls(
            done=sum(row.succeeded + row.failed + row.cancelled + row.expired for row in rows),
            failed=sum(row.failed for row in rows),
            retried=sum(row.retried for row in rows),
            running=sum(row.running for row in rows),
            left=sum(row.size for row in rows),
        )


class Display:
    """Shows the progress at each call of :meth:`tell`."""

    def __init__(self, total: int, before: Counts, *, quiet: bool = False) -> None:
        self._total = total
        self._before = before
        self._quiet = quiet
        self._began = time.monotonic()
        self._said = self._began
        self._live: tuple[Progress, TaskID] | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[Display]:
        """Show the bar on a terminal during the block."""
        from tidemill.cli.console import console

        out = console(stderr=True)
        if self._quiet or not sys.stderr.isatty():
            yield self
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = BarColumn(None), MofNCompleteColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=out, transient=True, refresh_per_second=10) as progress:
            self._live = progress, progress.add_task("", total=self._total)
            yield self
        self._live = None

    def tell(self, now: Counts) -> None:
        """Show the numbers of this run: the numbers ``now`` minus the numbers before the run."""
        seconds = time.monotonic() - self._began
        done = now.done - self._before.done
        text = (
            f"{done / max(seconds, 0.1):,.0f}/s, {now.running:,} leased, "
            f"{now.retried - self._before.retried} retried, "
            f"{now.failed - self._before.failed} failed"
        )
        if self._live is not None:
            progress, task = self._live
            progress.update(task, completed=self._total - now.left, description=text)
        elif not self._quiet and time.monotonic() - self._said >= _LINE_EVERY:
            self._said = time.monotonic()
            sys.stderr.write(f"{self._total - now.left:,} of {self._total:,} jobs done, {text}\n")
            sys.stderr.flush()
