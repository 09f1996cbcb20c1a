"""The screen of ``tidemill top``: the contents of a frame, and the effect of each key."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tidemill.cli import console
from tidemill.cli.top import tables
from tidemill.cli.top.snapshot import RunningJob, Snapshot

if TYPE_CHECKING:
    from rich.console import Console

HELP = (
    "q          end",
    "j k ↓ ↑    select a running job",
    "enter      show the trail of the selected job; enter or Esc goes back",
    "s          sort the queues by depth, age of the oldest job, rate, failures, name",
    "p          pause the display; the store is not read meanwhile",
    "?          show or hide these keys",
    "",
    "in/s, out/s, fail/s   jobs that were accepted, that ended, and that failed",
    "rate out              one bar for each minute, or for each refresh on a store without history",
    "for                   the time since the run began; a job may first wait in its worker",
)

_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_BOLD, _RED, _REVERSE, _DIM = "\x1b[1m", "\x1b[1;31m", "\x1b[7m", "\x1b[2m"


class View:
    """The state of the screen."""

    def __init__(self, url: str, *, bars: bool = True) -> None:
        self.snapshot: Snapshot | None = None
        self.error = ""  # the error of the last look at the store
        self.paused = False
        self.over = False
        self.opened = ""  # the id of the job whose trail is shown
        self.trail: list[str] = []
        self._url = url
        self._bars = bars
        self._sort = next(iter(tables.SORTS))
        self._help = False
        self._selected = ""  # the id of a running job
        self._top = 0  # the number of the first line of the trail that is shown

    # -- keys -----------------------------------------------------------------------------------

    def press(self, key: str) -> None:
        """Act on a key; an unknown key does nothing."""
        if key == "q":
            self.over = True
        elif key == "?":
            self._help = not self._help
        elif key == "p":
            self.paused = not self.paused
        elif key == "s":
            names = [*tables.SORTS]
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
        elif key in ("j", "down", "pagedown"):
            self._move(10 if key == "pagedown" else 1)
        elif key in ("k", "up", "pageup"):
            self._move(-10 if key == "pageup" else -1)
        elif key == "enter" and not self.opened:
            self.opened, self.trail, self._top = self._selected_id(), [], 0
        elif key in ("enter", "escape"):
            self.opened, self._help = "", False

    def _move(self, by: int) -> None:
        if self.opened:
            self._top = max(0, min(self._top + by, len(self.trail) - 1))
            return
        ids = [job.id for job in self._jobs()]
        if ids:
            at = ids.index(self._selected_id()) + by
            self._selected = ids[max(0, min(at, len(ids) - 1))]

    def _jobs(self) -> list[RunningJob]:
        return self.snapshot.jobs if self.snapshot is not None else []

    def _selected_id(self) -> str:
        """The id of the selected job, or of the first job when the selected job has ended."""
        ids = [job.id for job in self._jobs()]
        return self._selected if self._selected in ids else ids[0] if ids else ""

    # -- frames ---------------------------------------------------------------------------------

    def frame(self, columns: int, rows: int) -> list[str]:
        """The lines of a frame for a terminal of this size."""
        width = columns - 1  # the last column would make some terminals wrap
        out = console_of(width)
        head = self._head(width)
        foot = _plain("q end  p pause  s sort  j k select  enter trail  ? keys", width, _DIM)
        room = rows - len(head) - 1
        if self._help:
            body = [_plain(line, width) for line in HELP]
        elif self.opened:
            body = self._trail(width)
        elif self.snapshot is None:
            body = [] if self.error else ["reading …"]
        else:
            body = self._body(self.snapshot, out, room)
        return [*head, *body[:room], *[""] * (room - len(body)), foot]

    def _head(self, width: int) -> list[str]:
        snapshot = self.snapshot
        moment = time.strftime("%H:%M:%S", time.localtime(snapshot.at)) if snapshot else "--:--:--"
        state = "  PAUSED: p goes on" if self.paused else ""
        lines = [_plain(f"tidemill top  {moment}{state}  {self._url}", width, _BOLD)]
        if snapshot is not None:
            lines.append(_plain(tables.headline(snapshot), width))
            if snapshot.missing:
                lines.append(_plain(lacking(snapshot), width, _DIM))
        if self.error:
            lines.append(_plain(self.error, width, _RED))
        return [*lines, ""]

    def _trail(self, width: int) -> list[str]:
        lines = self.trail or [f"reading {self.opened} …"]
        return [_plain(line, width) for line in lines[self._top :]]

    def _body(self, snapshot: Snapshot, out: Console, room: int) -> list[str]:
        """Three tables: queues get up to a third of the room, workers a fifth, jobs the rest."""
        queues = tables.sorted_queues(snapshot, self._sort)
        most = max(2, room // 3 - 2)
        shown = queues[:most] if len(queues) > most else queues
        lines = [_title(f"QUEUES by {self._sort}", len(shown), len(queues), out.width)]
        lines += render(out, tables.queues_table(out, shown, bars=self._bars)) if shown else []
        if "running jobs" in snapshot.missing:
            return lines
        few = snapshot.workers[: max(1, room // 5 - 1)]
        below = ["", _title("WORKERS", len(few), len(snapshot.workers), out.width)]
        if few:
            below += render(out, tables.workers_table(out, few))
        else:
            below.append(_plain("none; start one: tidemill worker MODULE:VAR", out.width))
        left = room - len(lines) - len(below) - 3
        return [*lines, "", *self._running(snapshot, out, max(1, left)), *below]

    def _running(self, snapshot: Snapshot, out: Console, room: int) -> list[str]:
        jobs, selected = snapshot.jobs, self._selected_id()
        at = next((n for n, job in enumerate(jobs) if job.id == selected), 0)
        first = max(0, min(at - room // 2, len(jobs) - room))
        shown = jobs[first : first + room]
        name = "RUNNING" if snapshot.fetched == 0 else "RUNNING OR FETCHED"
        lines = [_title(f"{name}, longest first", len(shown), snapshot.leased, out.width)]
        if not shown:
            return [*lines, "no job is running"]
        header, *rows = render(out, tables.jobs_table(out, shown))
        marked = [
            _plain(_STYLE.sub("", row).ljust(out.width), out.width, _REVERSE) if n == at else row
            for n, row in enumerate(rows, first)
        ]
        return [*lines, header, *marked]


def lacking(snapshot: Snapshot) -> str:
    """The line that names the numbers that a message broker does not know, and the remedy."""
    missing = ", ".join(snapshot.missing)
    return f"this broker cannot report {missing}; lmdb, redis, postgresql and django can"


def _title(name: str, shown: int, count: int, width: int) -> str:
    more = f" ({shown:,} of {count:,})" if shown < count else f" ({count:,})"
    return _plain(f"{name}{more}", width, _BOLD)


def _plain(text: str, width: int, style: str = "") -> str:
    """One line of text, cut to the width; control characters are escaped."""
    text = console.clean(text, one_line=True)
    return style + (text if len(text) <= width else f"{text[: width - 1]}…")


def console_of(width: int) -> Console:
    """A console that collects the lines for a terminal in memory."""
    from rich.console import Console

    return Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        markup=False,
        highlight=False,
        emoji=False,
    )


def render(out: Console, *things: Any) -> Sequence[str]:
    """The things as lines of text; ``out`` is a console of :func:`console_of`."""
    file = out.file
    assert isinstance(file, io.StringIO)
    file.seek(0)
    file.truncate()
    for thing in things:
        out.print(thing)
    return [line.rstrip() for line in file.getvalue().splitlines()]
