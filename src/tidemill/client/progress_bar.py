"""A progress bar for many jobs, in terminals and notebooks only."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_EVERY = 0.1
"""Seconds between two updates in a notebook: each update is a message to a browser."""


class Bar:
    """A bar that counts but is not visible."""

    shown = False
    """True for a visible bar; an invisible bar needs no updates."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self.done = 0
        self.failed = 0

    def step(self, *, failed: bool) -> None:
        """Count one more ended job."""
        self.move(self.done + 1, self.failed + failed)

    def move(self, done: int, failed: int, total: int | None = None) -> None:
        """Set the numbers of ended jobs and of failed jobs."""
        self.done, self.failed, self.total = done, failed, total or self.total
        self.draw()

    def draw(self) -> None:
        """Draw the bar."""

    @property
    def text(self) -> str:
        """The numbers in words."""
        total = "" if self.total is None else f" of {self.total}"
        return f"{self.done}{total} ended" + (f", {self.failed} failed" if self.failed else "")


@contextmanager
def open_bar(total: int | None, *, show: bool) -> Iterator[Bar]:
    """A bar for the block. ``show`` makes it visible in terminals and notebooks."""
    if show and _in_notebook():
        notebook = _InNotebook(total)
        try:
            yield notebook
        finally:
            notebook.draw(last=True)
    elif show and sys.stderr is not None and sys.stderr.isatty():
        with _in_terminal() as rows:
            yield _InTerminal(total, rows)
    else:
        yield Bar(total)


# -- in a terminal -------------------------------------------------------------------------------


@contextmanager
def _in_terminal() -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    # On stderr: stdout may go into a pipe.
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as rows:
        yield rows


class _InTerminal(Bar):
    shown = True

    def __init__(self, total: int | None, rows: Any) -> None:
        super().__init__(total)
        self._rows = rows
        self._row = rows.add_task(self.text, total=total)

    def draw(self) -> None:
        self._rows.update(self._row, completed=self.done, total=self.total, description=self.text)


# -- in a notebook -------------------------------------------------------------------------------


class _Display(Protocol):
    def update(self, what: dict[str, str], *, raw: bool) -> object: ...


class _InNotebook(Bar):
    """A bar of plain HTML, which every notebook shows without a widget."""

    shown = True

    def __init__(self, total: int | None) -> None:
        super().__init__(total)
        # IPython is installed in notebooks only.
        from IPython.display import display  # type: ignore[import-not-found]  # is optional

        self._drawn = time.monotonic()
        self._display: _Display = display(self._content(), raw=True, display_id=True)

    def draw(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if last or now - self._drawn >= _EVERY:
            self._drawn = now
            self._display.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        size = "" if self.total is None else f' max="{self.total}" value="{self.done}"'
        return {"text/plain": self.text, "text/html": f"<progress{size}></progress> {self.text}"}


def _in_notebook() -> bool:
    """True in a notebook's kernel; IPython in a terminal counts as a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
