"""The screen of ``tidemill top``: the contents of a frame, and the effect of each key."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.layout import Layout
from rich.text import Text

from tidemill.app import Tidemill
from tidemill.cli.console import clean
from tidemill.cli.jobs import job_lines
from tidemill.cli.top import tables
from tidemill.cli.top.rates import Meter
from tidemill.cli.top.snapshot import RunningJob, Snapshot, take
from tidemill.core.errors import TidemillError

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
_FOOT = "q end  p pause  s sort  j k select  enter trail  ? keys"


class View:
    """The state of the screen; rich renders it as a frame for the size of the terminal."""

    def __init__(self, mill: Tidemill) -> None:
        self.paused = False
        self.over = False
        self._mill = mill
        self._meter = Meter()
        self._snapshot: Snapshot | None = None
        self._error = ""  # the error of the last look at the store
        self._opened = ""  # the id of the job whose trail is shown
        self._trail: list[str] = []
        self._sort = next(iter(tables.SORTS))
        self._help = False
        self._selected = ""  # the id of a running job
        self._top = 0  # the number of the first line of the trail that is shown

    def look(self) -> None:
        """Look at the store once. A thread of its own calls this, so keys work meanwhile."""
        opened = self._opened
        try:
            snapshot = take(self._mill, self._meter)
            trail = job_lines(self._mill, opened) if opened else []
        except TidemillError as error:
            self._error = str(error).splitlines()[0]
        else:
            self._snapshot, self._error = snapshot, ""
            if opened == self._opened:
                self._trail = trail

    # -- keys -----------------------------------------------------------------------------------

    def press(self, key: str) -> bool:
        """Act on a key; an unknown key does nothing. True if the store must be read at once."""
        opened = self._opened
        if key == "q":
            self.over = True
        elif key == "?":
            self._help = not self._help
        elif key == "p":
            self.paused = not self.paused
        elif key == "s":
            names = [*tables.SORTS]
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
        elif key in ("j", "k"):
            self._move(1 if key == "j" else -1)
        elif key == "\n" and not self._opened:
            self._trail, self._top = [], 0
            self._opened = self._selected_id()
        elif key in ("\n", "\x1b"):
            self._opened, self._help = "", False
        return key == "p" or self._opened != opened

    def _move(self, by: int) -> None:
        if self._opened:
            self._top = max(0, min(self._top + by, len(self._trail) - 1))
        elif ids := [job.id for job in self._jobs()]:
            at = ids.index(self._selected_id()) + by
            self._selected = ids[max(0, min(at, len(ids) - 1))]

    def _jobs(self) -> list[RunningJob]:
        return self._snapshot.jobs if self._snapshot is not None else []

    def _selected_id(self) -> str:
        """The id of the selected job, or of the first job when the selected job has ended."""
        ids = [job.id for job in self._jobs()]
        return self._selected if self._selected in ids else ids[0] if ids else ""

    # -- frames ---------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Layout]:
        head = [*self._head()]
        body = self._body(console, options.size.height - len(head) - 1)
        layout = Layout()
        layout.split_column(Layout(Group(*head, *body)), Layout(_line(_FOOT, "dim"), size=1))
        yield layout

    def _head(self) -> Iterator[Text]:
        snapshot, url = self._snapshot, self._mill.broker.url
        moment = time.strftime("%H:%M:%S", time.localtime(snapshot.at)) if snapshot else "--:--:--"
        state = "  PAUSED: p goes on" if self.paused else ""
        yield _line(f"tidemill top  {moment}{state}  {url}", "bold")
        if snapshot is not None:
            yield _line(tables.headline(snapshot))
            if snapshot.missing:
                yield _line(tables.lacking(snapshot), "dim")
        if self._error:
            yield _line(self._error, "bold red")
        yield Text()

    def _body(self, out: Console, room: int) -> Iterator[RenderableType]:
        if self._help:
            yield from map(_line, HELP)
        elif self._opened:
            lines = self._trail or [f"reading {self._opened} …"]
            yield from map(_line, lines[self._top :])
        elif self._snapshot is not None:
            yield from self._tables(self._snapshot, out, room)
        elif not self._error:
            yield _line("reading …")

    def _tables(self, snapshot: Snapshot, out: Console, room: int) -> Iterator[RenderableType]:
        """Three tables: queues get up to a third of the room, workers a fifth, jobs the rest."""
        queues = tables.sorted_queues(snapshot, self._sort)
        shown = queues[: max(2, room // 3 - 2)]
        yield _title(f"QUEUES by {self._sort}", len(shown), len(queues))
        if shown:
            yield tables.queues_table(out, shown)
        if "running jobs" in snapshot.missing:
            return
        workers = snapshot.workers[: max(1, room // 5 - 1)]
        yield Text()
        used = len(shown) + bool(shown) + len(workers) + 7  # with titles, headers and empty lines
        yield from self._running(snapshot, out, max(1, room - used))
        yield Text()
        yield _title("WORKERS", len(workers), len(snapshot.workers))
        if workers:
            yield tables.workers_table(out, workers)
        else:
            yield _line("none; start one: tidemill worker MODULE:VAR")

    def _running(self, snapshot: Snapshot, out: Console, room: int) -> Iterator[RenderableType]:
        jobs, selected = snapshot.jobs, self._selected_id()
        at = next((n for n, job in enumerate(jobs) if job.id == selected), 0)
        first = max(0, min(at - room // 2, len(jobs) - room))
        shown = jobs[first : first + room]
        name = "RUNNING" if snapshot.fetched == 0 else "RUNNING OR FETCHED"
        yield _title(f"{name}, longest first", len(shown), snapshot.totals["running"] or 0)
        if shown:
            yield tables.jobs_table(out, shown, selected=at - first)
        else:
            yield _line("no job is running")


def _title(name: str, shown: int, count: int) -> Text:
    more = f" ({shown:,} of {count:,})" if shown < count else f" ({count:,})"
    return _line(name + more, "bold")


def _line(text: str, style: str = "") -> Text:
    """One line of text, cut to the width; control characters are escaped."""
    return Text(clean(text, one_line=True), style, no_wrap=True, overflow="ellipsis")
