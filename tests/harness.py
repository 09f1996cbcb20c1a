"""Real workers on a real store, for tests: started, watched, signalled and always ended by pid.

A test writes the tasks it needs as an app module, starts workers on it, and waits for what must
happen: a state, a file, a line of output. Every wait has a generous limit. Its error shows what it
waited for, the workers' output, and the report of ``tidemill doctor``. ``Place`` is one temporary
directory with a store, an app, and a ledger in which tasks may note what they did
(``begin``/``end`` lines by ``O_APPEND``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import operator
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from tidemill import Tidemill
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Record, State
from tidemill.doctor.examine import examine as doctor

T = TypeVar("T")
LIMIT = 120.0
"""Seconds a wait lasts at most: far more than anything here takes on a busy machine."""

SLACK = 25.0
"""Seconds granted beyond what a law says, for a busy machine and a disk that stalls. What would
happen otherwise happens later: a lease is over after 30 s."""

PATIENT = {"TIDEMILL_WAITS": '{"stuck": 30, "silent": 30}'}
"""The environment of a worker that a busy machine does not mislead about its jobs. Else the worker
takes a job for stuck that does not end within half a second of its timeout, and a busy machine may
give a process no processor for so long. Then the worker replaces the process."""

UNFINISHED = (State.WAITING, State.SCHEDULED, State.READY, State.RUNNING)

PRELUDE = """
from __future__ import annotations
import asyncio, ctypes, dataclasses, os, re, signal, socket, subprocess, sys, threading, time
from tidemill import Fail, Retries, Retry, Tidemill, this_job
from tidemill.core.retry import JobTerminated, JobTimeout, Snooze

HERE = os.path.dirname(os.path.abspath(__file__))
mill = Tidemill({url!r}{options})

def note(*words):
    line = " ".join(map(str, words)) + "\\n"
    fd = os.open(os.path.join(HERE, "ledger"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)

def begin():
    job = this_job()
    note("begin", job.id, job.attempt, os.getpid(), time.time())

def end():
    job = this_job()
    note("end", job.id, job.attempt, os.getpid(), time.time())

def hold_gil(seconds):
    # A C call that never gives up the interpreter lock: backtracking that takes for ever.
    if seconds > 5:
        re.match(r"(a+)+$", "a" * 60 + "b")
    pattern, text, until = re.compile(r"(a+)+$"), "a" * 22 + "b", time.time() + seconds
    while time.time() < until:
        pattern.match(text)

def hold_gil_until(name):
    # Two C calls that keep the interpreter lock: note "held", and wait until the test opens this
    # pipe; see Place.gate. No thread that waits for the lock gets it between the two calls.
    keep, pipe = ctypes.PyDLL(None), os.path.join(HERE, name).encode()
    fd = os.open(os.path.join(HERE, "ledger"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.setswitchinterval(1.0)
    time.sleep(0.01)
    keep.write(fd, b"held\\n", 5)
    keep.open(pipe, os.O_RDONLY)
    sys.setswitchinterval(0.005)
    os.close(fd)
"""


def eventually(
    check: Callable[[], T], what: str = "it", limit: float = LIMIT, pause: float = 0.01
) -> T:
    """Wait until ``check()`` is true; what it returned.

    Raises:
        AssertionError: it was not within ``limit`` seconds.
    """
    until = time.monotonic() + limit
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not within {limit:g} s")
        time.sleep(pause)


def alive(pid: int) -> bool:
    """True while the process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Line(NamedTuple):
    """One line of the ledger: what, by which job, in which attempt and process, when."""

    what: str
    id: str
    attempt: int
    pid: int
    time: float


class Worker:
    """One ``tidemill worker`` as a subprocess, in a process group of its own."""

    def __init__(
        self, place: Place, args: Sequence[str], env: dict[str, str], under: Sequence[str] = ()
    ) -> None:
        self._place = place
        self.log = place.path / f"worker-{len(place.workers)}.log"
        self._file = self.log.open("wb")
        self._known: set[int] = set()
        self.process = subprocess.Popen(
            [*under, sys.executable, "-m", "tidemill", "worker", f"{place.app}:mill", *args],
            cwd=place.path,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        self.pid = self.process.pid

    # -- looking --------------------------------------------------------------------------------

    @property
    def output(self) -> str:
        """All it and its processes have printed."""
        return self.log.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """Its worker processes, oldest first."""
        try:
            children = psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []
        self._known.update(c.pid for c in children)
        found = []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                if "tidemill.worker_main" in child.cmdline():
                    found.append((child.create_time(), child.pid, child))
        return [child for *_, child in sorted(found, key=lambda row: row[:2])]

    def wait_line(self, text: str, count: int = 1, limit: float = LIMIT) -> None:
        """Until the text has been printed ``count`` times."""
        self._until(lambda: self.output.count(text) >= count, f"printing {text!r}", limit)

    def wait_ready(self) -> Worker:
        """Until it serves."""
        self.wait_line(" serves ")
        return self

    def _until(self, check: Callable[[], Any], what: str, limit: float = LIMIT) -> None:
        try:
            eventually(lambda: check() or self.process.poll() is not None, what, limit)
            assert check(), f"{what}: the worker ended with {self.process.returncode}"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._place.told()}") from None

    def troubles(self) -> list[str]:
        """The warnings and errors that it has logged."""
        lines = self.output.splitlines()
        return [line for line in lines if " WARNING " in line or " ERROR " in line]

    # -- ending ---------------------------------------------------------------------------------

    def send(self, signum: int) -> None:
        """Send a signal to the supervisor."""
        os.kill(self.pid, signum)

    def wait(self, limit: float = LIMIT) -> int:
        """Until it has ended; the exit code."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            text = f"it did not end within {limit:g} s\n{self._place.told()}"
            raise AssertionError(text) from None

    def stop(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.send(signum)
        return self.wait()

    def kill_everything(self) -> list[int]:
        """``kill -9`` of the supervisor and of all its processes with their groups, at once;
        the processes."""
        self.children()
        groups = [pid for pid in self._known if alive(pid)]
        self._place.killed.append(time.time())
        os.kill(self.pid, signal.SIGKILL)
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self.process.wait()
        return groups

    def close(self) -> None:
        """Whatever happened: nothing of it is left."""
        self.children()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        for group in self._known:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self._file.close()


class Place:
    """A temporary directory with a store, an app on it, and workers."""

    def __init__(self, path: Path, url: str = "") -> None:
        self.path = path
        self.app = f"app_{path.name.replace('-', '_')}"
        self.url = url or f"lmdb://{path}/store"
        self.mill = Tidemill(self.url, allow_imports=["*"])
        self.workers: list[Worker] = []
        self.killed: list[float] = []  # when workers were killed
        self.module: Any = None

    def write(self, source: str, *, load: bool = True, **options: Any) -> None:
        """Write the app: the source follows a prelude with ``mill``, ``note``, ``begin``, ``end``.

        ``options`` are those of ``mill``. The app is imported here too, unless told otherwise, so
        that what is enqueued has the options its tasks declare.
        """
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        code = PRELUDE.format(url=self.url, options=given) + textwrap.dedent(source)
        file = self.path / f"{self.app}.py"
        file.write_text(code)
        if load:
            self._unload()
            spec = importlib.util.spec_from_file_location(self.app, file)
            self.module = sys.modules[self.app] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.module)

    def gate(self, name: str) -> Callable[[], None]:
        """A pipe for ``hold_gil_until`` in the app; what ends the call that is in it."""
        pipe = self.path / name
        os.mkfifo(pipe)
        return lambda: os.close(os.open(pipe, os.O_WRONLY))

    def task(self, name: str) -> str:
        """The name a function of the app has as a task."""
        return f"{self.app}.{name}"

    def enqueue(self, name: str, *args: Any, **options: Any) -> Any:
        """Enqueue a function of the app by name; keywords are options of the call."""
        return self.configured(name, options).enqueue(*args)

    def enqueue_many(self, name: str, arguments: Iterable[tuple[Any, ...]], **options: Any) -> Any:
        """Enqueue many calls of a function of the app in one commit."""
        configured = self.configured(name, options)
        return self.module.mill.enqueue_many([configured.call(*args) for args in arguments])

    def configured(self, name: str, options: dict[str, Any]) -> Any:
        """The task of that name with options set."""
        return operator.attrgetter(name)(self.module).using(**options)

    def worker(
        self,
        *args: str,
        processes: int = 1,
        slots: int = 4,
        env: dict[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> Worker:
        """Start a worker; ``under`` another command."""
        numbers = ["-p", str(processes), "-c", str(slots)]
        worker = Worker(self, [*numbers, *args], env or {}, under)
        self.workers.append(worker)
        return worker

    def drain(self, *args: str, slots: int = 8, standstill: float = 60.0) -> Worker:
        """Run a worker until nothing unfinished is left, as long as jobs end now and then."""
        worker = self.worker(*args, slots=slots)
        while left := self.unfinished():
            worker._until(functools.partial(self._has_fewer, left), f"draining {left}", standstill)
        worker.stop()
        return worker

    def _has_fewer(self, jobs: int) -> bool:
        return self.unfinished() < jobs

    # -- looking --------------------------------------------------------------------------------

    def ledger(self) -> list[Line]:
        """All begins and ends, in the order they happened."""
        lines = [line.split() for line in self.notes()]
        return [
            Line(w[0], w[1], int(w[2]), int(w[3]), float(w[4]))
            for w in lines
            if w[0] in ("begin", "end") and len(w) == 5
        ]

    def notes(self) -> list[str]:
        """All lines of the ledger as they are, without a line that is only half written."""
        try:
            return (self.path / "ledger").read_text().rpartition("\n")[0].splitlines()
        except FileNotFoundError:
            return []

    def wait_notes(self, what: str, count: int = 1, limit: float = LIMIT) -> list[str]:
        """Until ``count`` lines start with ``what``; these lines."""

        def enough() -> list[str] | None:
            found = [line for line in self.notes() if line.startswith(what)]
            return found if len(found) >= count else None

        try:
            return eventually(enough, f"{count} notes {what!r}", limit)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.notes()}\n{self.told()}") from None

    def wait_state(self, job: Any, *states: State, limit: float = LIMIT) -> Record:
        """Until the job is in one of the states; its record."""
        try:
            eventually(lambda: job.refresh().state in states, f"{job.id} becomes {states}", limit)
        except AssertionError as error:
            raise AssertionError(f"{error}\nnow {job.refresh()}\n{self.told()}") from None
        return job.refresh()

    def finish(self, jobs: Iterable[Any], limit: float = LIMIT) -> list[Record]:
        """Until all the jobs have finished, however; their records."""
        jobs = list(jobs)
        records = self.mill.broker.wait_for([job.id for job in jobs], limit)
        for job, record in zip(jobs, records, strict=True):
            assert record is not None, f"job {job.id} is lost"
            assert record.state.finished, (
                f"job {job.id} is {record.state} after {limit:g} s\n{self.told()}"
            )
        return [record for record in records if record is not None]

    def records(self) -> list[Record]:
        """Every job of the store."""
        found: list[Record] = []
        cursor = ""
        while True:
            page = self.mill.jobs(Filter()).page(limit=1000, cursor=cursor)
            found += page.records
            cursor = page.cursor
            if not cursor:
                return found

    def unfinished(self) -> int:
        """How many jobs are not finished."""
        return sum(row.size for row in self.mill.queues())

    def outputs(self) -> str:
        """What all workers printed."""
        return "\n".join(f"--- {worker.log.name}\n{worker.output}" for worker in self.workers)

    def told(self) -> str:
        """What a failure shows: the workers' output, and the report of ``tidemill doctor``."""
        return f"{self.outputs()}\n{self.diagnosis()}"

    def diagnosis(self, limit: float = 20.0) -> str:
        """What ``tidemill doctor`` says of the store within ``limit`` seconds."""
        lines = ["--- doctor"]

        def examine() -> None:
            try:
                with Tidemill(self.url) as mill:
                    lines.extend(f"{f.status:6}{f.check:11}{f.message}" for f in doctor(mill))
            except Exception as error:  # the failure of the test is what matters
                lines.append(f"it failed: {error!r}")

        thread = threading.Thread(target=examine, daemon=True)
        thread.start()
        thread.join(limit)
        return "\n".join([*lines, *([f"no more within {limit:g} s"] * thread.is_alive())])

    def close(self) -> None:
        """End all workers, close the store."""
        for worker in self.workers:
            worker.close()
        self.mill.close()
        self._unload()

    def _unload(self) -> None:
        if self.module is not None:
            self.module.mill.close()  # else its connections stay open until a collection
            sys.modules.pop(self.app, None)


def runs_of(lines: Iterable[Line]) -> dict[str, list[tuple[Line, Line | None]]]:
    """By job: every run as its begin and its end, if it got that far, in order of beginning."""
    runs: dict[str, list[tuple[Line, Line | None]]] = defaultdict(list)
    for line in lines:
        if line.what == "begin":
            runs[line.id].append((line, None))
        else:
            for at in range(len(runs[line.id]) - 1, -1, -1):
                begin, ended = runs[line.id][at]
                if ended is None and begin.pid == line.pid and begin.attempt == line.attempt:
                    runs[line.id][at] = begin, line
                    break
    return runs


def check_no_overlap(lines: Iterable[Line]) -> None:
    """No job has two runs at a time, as far as ends are known."""
    for job_id, runs in runs_of(lines).items():
        for (_, ended), (begin, _) in itertools.pairwise(runs):
            assert ended is None or ended.time <= begin.time, (
                f"two runs of {job_id} overlap: {runs}"
            )


def check_counters(place: Place) -> None:
    """The counters of every queue equal a recount of its records.

    A scheduled job whose time has come may count as ready before an owner moves it.
    """
    counted: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    records, rows = place.records(), place.mill.queues()
    now = place.mill.broker.wall()
    for record in records:
        has_come = record.state is State.SCHEDULED and record.due <= now
        counted[record.envelope.queue]["come" if has_come else str(record.state)] += 1
    for row in rows:
        found = counted[row.name]
        moved = max(0, min(found["come"], found["scheduled"] + found["come"] - row.scheduled))
        found["scheduled"] += found["come"] - moved
        found["ready"] += moved
        for state in (*UNFINISHED, State.SUCCEEDED, State.FAILED):
            told, found = getattr(row, str(state)), counted[row.name][str(state)]
            assert told == found, f"queue {row.name}: {told} {state} by the counter, {found} found"


@contextlib.contextmanager
def open_place(path: Path, url: str = "") -> Iterator[Place]:
    """A place for the time of a block."""
    place = Place(path, url)
    try:
        yield place
    finally:
        place.close()


def opened(stack: contextlib.ExitStack, url: str) -> Any:
    """A broker that the stack closes."""
    return stack.enter_context(contextlib.closing(open_broker(url)))
