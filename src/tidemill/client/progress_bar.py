"""A progress bar for many jobs, in terminals and notebooks only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """The numbers of ended and failed jobs, in a row of ``rows`` if the bar is visible."""

    def __init__(self, total: int | None, rows: Progress | None = None) -> None:
        self.shown = rows is not None
        self._total, self._done, self._failed = total, 0, 0
        self._rows = rows
        if rows is not None:
            self._row = rows.add_task("", total=total)
            self.move(0, 0)

    def step(self, *, failed: bool) -> None:
        """Count one more ended job."""
        self.move(self._done + 1, self._failed + failed)

    def move(self, done: int, failed: int, total: int | None = None) -> None:
        """Set the numbers of ended jobs and of failed jobs."""
        self._done, self._failed, self._total = done, failed, total or self._total
        if self._rows is not None:
            of = "" if self._total is None else f" of {self._total}"
            text = f"{done}{of} ended" + (f", {failed} failed" if failed else "")
            self._rows.update(self._row, completed=done, total=self._total, description=text)


@contextmanager
def open_bar(total: int | None, *, show: bool) -> Iterator[Bar]:
    """A bar for the block. ``show`` makes it visible in terminals and notebooks."""
    rows = _rows() if show else None
    if rows is None:
        yield Bar(total)
        return
    with rows:
        try:
            yield Bar(total, rows)
        finally:
            rows.refresh()  # rich itself shows no last state in a notebook


def _rows() -> Progress | None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    out = Console(stderr=True)  # stdout may go into a pipe
    if not (out.is_jupyter or out.file.isatty()):
        return None
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Progress(*columns, console=out)
