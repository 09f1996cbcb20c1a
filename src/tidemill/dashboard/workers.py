"""The pages of workers: the workers of each host, and the jobs that they run now."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple

from starlette.responses import HTMLResponse, Response

from tidemill.brokers.contract.features import Feature
from tidemill.client.worker_reports import ask_worker, flame_graph
from tidemill.core.clock import clock
from tidemill.core.job import Command, Owner, Record
from tidemill.core.scoreboard import read_runs
from tidemill.dashboard.overview import worker_command
from tidemill.dashboard.page import NotFound, Page
from tidemill.dashboard.roles import Role
from tidemill.dashboard.routes import Routes
from tidemill.errors import InvalidOption

routes = Routes()

_COMMANDS = {
    "quiet": "was asked to take no more jobs; its running jobs go on",
    "stop": "was asked to stop: it finishes its running jobs within its grace time",
}
_AUDIT = {"quiet": "quieted worker", "stop": "stopped worker"}
LONGEST = 60.0  # seconds of the longest profile: the browser waits for its end
HERTZ = 100.0


class Run(NamedTuple):
    record: Record
    pid: int  # 0 without a scoreboard on this machine
    started: float  # the time of the lease without a scoreboard on this machine
    is_fetched: bool


class WorkerRow(NamedTuple):
    """A worker, its running jobs, the number of its fetched jobs, and its use of memory."""

    owner: Owner
    runs: list[Run]
    fetched: int
    usage: Usage | None

    @property
    def busy(self) -> int:
        return len(self.runs)

    @property
    def idle(self) -> int:
        return max(0, self.owner.concurrency - self.busy)

    @property
    def share(self) -> float:
        """The part of its slots that are busy, 0 to 1."""
        return min(1.0, self.busy / self.owner.concurrency) if self.owner.concurrency else 0.0


@routes.get("/workers")
def index(page: Page) -> Response:
    if not page.has(Feature.INSPECT):
        nothing: dict[str, Any] = {"hosts": {}, "consumers": [], "queue": "", "command": ""}
        nothing |= {"slots": 0, "busy": 0, "fetched": 0, "count": 0, "knows": False}
        return page.render("workers.html", title="Workers", **nothing)
    queue = page.request.arg("queue")
    owners = page.look.serving(queue) if queue else page.look.workers
    held = _held(page)
    hosts: dict[str, list[WorkerRow]] = {}
    for owner in sorted(owners, key=lambda one: (one.host, one.name)):
        hosts.setdefault(owner.host or "unknown host", []).append(
            _row(owner, page.look.workers, held, page.held.fetched)
        )
    rows = [row for host in hosts.values() for row in host]
    return page.render(
        "workers.html",
        title="Workers",
        hosts=hosts,
        knows=True,
        consumers=[owner for owner in page.look.owners if owner.kind != "worker"],
        queue=queue,
        command=worker_command(page, queue),
        slots=sum(row.owner.concurrency for row in rows),
        busy=sum(row.busy for row in rows),
        fetched=sum(row.fetched for row in rows),
        count=len(rows),
        now=clock.wall(),
        every=2,
    )


def _held(page: Page) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in page.held.records:
        found.setdefault(record.worker, []).append(record)
    return found


def _known_runs(owner: Owner) -> dict[int, tuple[int, float]] | None:
    """The runs of a worker by its scoreboard; None for a worker on another machine."""
    is_here = owner.host == socket.gethostname()
    return read_runs(owner.board, owner.id) if owner.board and is_here else None


def _row(
    owner: Owner, owners: list[Owner], held: dict[str, list[Record]], fetched: Collection[int]
) -> WorkerRow:
    """What a worker runs. Jobs name their worker, and several workers may have one name."""
    known = _known_runs(owner)
    twins = [_known_runs(one) for one in owners if one.name == owner.name and one.id != owner.id]
    runs = []
    for record in held.get(owner.name, ()):
        run = known.get(record.token) if known is not None else None
        if any(record.token in twin for twin in twins if twin is not None):
            continue
        if known is not None and run is None and None in twins:
            continue  # the worker of the same name on another machine may hold the job
        pid, started = run or (0, 0.0 if known is not None else record.leased)
        is_fetched = record.token in fetched if known is None else run is None
        runs.append(Run(record, pid, started, is_fetched))
    waiting = sum(run.is_fetched for run in runs)
    runs = [run for run in runs if not run.is_fetched]
    # A scoreboard also has jobs that have ended, whose ends are not stored yet. These jobs began
    # first.
    runs.sort(key=lambda run: -run.started)
    runs = sorted(runs[: owner.concurrency or None], key=lambda run: run.started)
    is_here = owner.host == socket.gethostname()
    usage = _usages.of(owner.pid) if is_here and owner.pid else None
    return WorkerRow(owner, runs, waiting, usage)


@routes.post("/workers/{owner_id}/dump", role=Role.ADMIN)
def dump(page: Page, owner_id: str) -> Response:
    """Show the stacks of all threads of a worker, which may be on another machine."""
    owner = _worker(page, owner_id)
    report = ask_worker(page.mill.broker, owner, "dump")
    page.audit("looked at the stacks of worker", owner.name)
    title = f"Stacks of {owner.name}"
    values: dict[str, Any] = {"report": report, "at": clock.wall(), "still": True}
    return page.render("stacks.html", title=title, **values)


@routes.post("/workers/{owner_id}/profile", role=Role.ADMIN)
def profile(page: Page, owner_id: str) -> Response:
    """Take a profile of a worker, and send it as a file: a flame graph that needs no server."""
    owner = _worker(page, owner_id)
    text = page.request.field("seconds", "5")
    seconds = float(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0.0
    if not 1 <= seconds <= LONGEST:
        raise InvalidOption(f"seconds must be a whole number from 1 to {LONGEST:g}")
    report = ask_worker(page.mill.broker, owner, "profile", seconds, HERTZ)
    page.audit("took a profile of worker", owner.name)
    note = f"{seconds:g} s at {HERTZ:g} samples per second; {report.samples:,} looks."
    body = flame_graph(report.stacks, f"Profile of {owner.name}", note)
    name = "".join(sign if sign.isalnum() else "-" for sign in owner.name if sign.isascii())
    disposition = f'attachment; filename="profile-{name}.html"'
    headers = {"content-disposition": disposition, "cache-control": "no-store"}
    return HTMLResponse(body, headers=headers)


def _worker(page: Page, owner_id: str) -> Owner:
    found = next((one for one in page.look.workers if one.id == owner_id), None)
    if found is None:
        raise InvalidOption("that worker is gone")
    return found


@routes.post("/workers/{owner_id}/{verb}", role=Role.ADMIN)
def command(page: Page, owner_id: str, verb: str) -> Response:
    if verb not in _COMMANDS:
        raise NotFound(f"a worker has no command {verb[:50]!r}")
    owner = _worker(page, owner_id)
    if not page.mill.broker.command(owner_id, Command(verb)):
        raise InvalidOption("that worker is gone")
    page.audit(_AUDIT[verb], owner.name)
    return page.back(f"Worker {owner.name} {_COMMANDS[verb]}.", "/workers")


_MOST = 2000
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """The memory of a worker's processes in bytes, and the processors that they used."""

    processes: int
    memory: int
    cpu: float | None  # the mean since the last reading; 1.0 is one busy processor


class Usages:
    """Reads the usage of processes, and remembers their processor time between readings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[int, tuple[float, float, float | None]] = {}

    def of(self, pid: int) -> Usage | None:
        """The usage of a process and of its children; None where it cannot be read."""
        memory, ticks, count = 0, 0, 0
        for one in [pid, *_children(pid)]:
            found = _read(one)
            if found is not None:
                memory, ticks, count = memory + found[0], ticks + found[1], count + 1
        if not count:
            return None
        return Usage(count, memory, self._rate(pid, ticks / _TICKS))

    def _rate(self, pid: int, used: float) -> float | None:
        now = time.monotonic()
        with self._lock:
            if len(self._last) > _MOST:
                self._last.clear()
            before = self._last.get(pid)
            if before is None:
                self._last[pid] = now, used, None
                return None
            if now - before[0] < 1:
                return before[2]
            rate = max(0.0, (used - before[1]) / (now - before[0]))
            self._last[pid] = now, used, rate
            return rate


_usages = Usages()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *_children(child)]
    return found


def _read(pid: int) -> tuple[int, int] | None:
    """The unshared memory of a process in bytes, and the clock ticks that the process used."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/statm") as file:
            sizes = file.read().split()
    except OSError:
        return None
    return (int(sizes[1]) - int(sizes[2])) * _PAGE, int(fields[11]) + int(fields[12])
