"""The screen of ``tidemill top``: tables, frames, and the terminal with its keys and signals."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.text import Text

from tidemill.app import Tidemill
from tidemill.cli import console
from tidemill.cli.jobs import job_lines
from tidemill.cli.top.snapshot import Meter, QueueRow, RunningJob, Snapshot, WorkerRow, take
from tidemill.core.clock import short_id
from tidemill.core.words import counted
from tidemill.doctor.words import running_in_words
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.cli.console import Table

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
        self._sort = next(iter(SORTS))
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
            names = [*SORTS]
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
            yield _line(headline(snapshot))
            if snapshot.missing:
                yield _line(lacking(snapshot), "dim")
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
        queues = sorted_queues(snapshot, self._sort)
        shown = queues[: max(2, room // 3 - 2)]
        yield _title(f"QUEUES by {self._sort}", len(shown), len(queues))
        if shown:
            yield queues_table(out, shown)
        if "running jobs" in snapshot.missing:
            return
        workers = snapshot.workers[: max(1, room // 5 - 1)]
        yield Text()
        used = len(shown) + bool(shown) + len(workers) + 7  # with titles, headers and empty lines
        yield from self._running(snapshot, out, max(1, room - used))
        yield Text()
        yield _title("WORKERS", len(workers), len(snapshot.workers))
        if workers:
            yield workers_table(out, workers)
        else:
            yield _line(snapshot.moved or "none; start one: tidemill worker MODULE:VAR")

    def _running(self, snapshot: Snapshot, out: Console, room: int) -> Iterator[RenderableType]:
        jobs, selected = snapshot.jobs, self._selected_id()
        at = next((n for n, job in enumerate(jobs) if job.id == selected), 0)
        first = max(0, min(at - room // 2, len(jobs) - room))
        shown = jobs[first : first + room]
        name = "RUNNING" if snapshot.fetched == 0 else "RUNNING OR FETCHED"
        yield _title(f"{name}, longest first", len(shown), snapshot.totals["running"] or 0)
        if shown:
            yield jobs_table(out, shown, selected=at - first)
        else:
            yield _line("no job is running")


def _title(name: str, shown: int, count: int) -> Text:
    more = f" ({shown:,} of {count:,})" if shown < count else f" ({count:,})"
    return _line(name + more, "bold")


def _line(text: str, style: str = "") -> Text:
    """One line of text, cut to the width; control characters are escaped."""
    return Text(console.clean(text, one_line=True), style, no_wrap=True, overflow="ellipsis")


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
    return sorted(snapshot.queues, key=SORTS[sort])


def headline(snapshot: Snapshot) -> str:
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
        known.append(f"{counted(len(workers), 'worker')} with {counted(slots, 'slot')}")
    return "   ".join(known)


def lacking(snapshot: Snapshot) -> str:
    """The line that names the numbers that a message broker does not know, and the remedy."""
    missing = ", ".join(snapshot.missing)
    return f"this broker cannot report {missing}; lmdb, redis, postgresql and django can"


def queues_table(out: Console, rows: Sequence[QueueRow]) -> Table:
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
    most = max(points, default=0.0) or 1.0
    return "".join(_BARS[round(point / most * 7)] for point in points)


def _note(row: QueueRow) -> Text | str:
    """The problem of a queue; else, on a message broker, the number of consumers."""
    if row.stats.paused:
        return console.styled("paused")
    if row.note:
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


_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"  # synchronized output: a frame appears as a whole
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Z]|.", re.DOTALL)
_NAMES = {"\x1b[A": "k", "\x1bOA": "k", "\x1b[B": "j", "\x1bOB": "j", "\r": "\n"}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


class Terminal:
    """A terminal that shows one renderable of rich, and reads keys.

    A signal only writes its number into a pipe. :meth:`read_keys` acts on it, so no signal
    interrupts a frame or the end.
    """

    def __init__(self, shown: RenderableType) -> None:
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(errors="replace")  # not every terminal has all characters
        out = Console(force_terminal=True, force_interactive=True, highlight=False)
        self._live = Live(
            shown,
            console=out,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._in = sys.stdin.fileno()
        self._saved = termios.tcgetattr(self._in)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._handlers = {s: signal.signal(s, lambda signum, frame: None) for s in _SIGNALS}

    def begin(self) -> None:
        tty.setcbreak(self._in)  # read single keys without echo; Ctrl-C still sends a signal
        self._live.start()

    def end(self) -> None:
        self._leave()
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _leave(self) -> None:
        with contextlib.suppress(OSError, termios.error):  # the terminal may be gone
            self._live.stop()
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._saved)

    def show(self) -> None:
        sys.stdout.write(_BEGIN)
        self._live.refresh()
        sys.stdout.write(_END)
        sys.stdout.flush()

    def wake(self) -> None:
        """Make :meth:`read_keys` return. Every thread may call this."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so it will return
            os.write(self._wake, b"\0")

    def read_keys(self) -> list[str]:
        """The keys that were pressed; waits for a key, a wake-up or a signal."""
        # An arrow is j or k, and Enter is a line feed.
        ready, _, _ = select.select([self._in, self._woken], [], [])
        signals = os.read(self._woken, 4096) if self._woken in ready else b""
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if signum in signals:
                raise SystemExit(128 + signum)
        if signal.SIGINT in signals:
            return ["q"]
        if signal.SIGTSTP in signals:
            self._leave()
            os.kill(os.getpid(), signal.SIGSTOP)  # ends when the shell continues this program
            self.begin()
        if self._in not in ready:
            return []
        data = os.read(self._in, 1024)  # the bytes of one key arrive together
        if not data:
            raise SystemExit(0)  # the terminal is closed
        keys = _KEY.findall(data.decode(errors="replace"))
        return [str(_NAMES.get(key, key)) for key in keys]
