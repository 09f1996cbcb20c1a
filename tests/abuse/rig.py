"""The rig: one misdeed in one pool of a real worker, with jobs beside and after the misdeed.

1. A worker starts on a store of its own. All slots run a job at a time once.
2. Long jobs take slots beside the misdeed, and short jobs come before and after it.
3. The misdeed runs. Once its job has ended, the next job is enqueued and timed.
4. The long jobs are released. Jobs that need all slots at a time run.
5. The worker is told to stop. Nothing of it may be left.

``try_misdeed`` returns what happened, with a sentence for each broken promise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from harness import Worker, eventually, open_place

from abuse.app import declare
from abuse.catalogue import ASYNCIO, MAIN, THREADS, End, Misdeed, catalogue
from abuse.counters import Counters
from tidemill.core.job import Record, State

_TESTS = Path(__file__).resolve().parent.parent

CELLS = ((THREADS, 4), (MAIN, 1), (MAIN, 4), (ASYNCIO, 1), (ASYNCIO, 4))
"""Pools and their slots. ``-c 1`` runs sync jobs in the main thread, so no pool has one thread.
Four slots of main threads are four processes."""


def one_cell(entry: Misdeed) -> tuple[str, int]:
    """Give each misdeed a pool, in turn; never four main threads."""
    cells = [cell for cell in CELLS if cell[0] in entry.ends and cell != (MAIN, 4)]
    return cells[list(catalogue()).index(entry.name) % len(cells)]


WITHIN = 2.0
"""Seconds within which the worker serves the next job."""

START = 60.0
"""Seconds that the worker has to run the first jobs in all its processes."""

LIMIT = 15.0
"""Seconds a later wait of the rig lasts at most, until a wait has been in vain."""

SHUTDOWN = 6.0
"""The worker's ``--shutdown-timeout``."""

MISDEED, NEXT, OVERDUE, AFTER = 0, 1, 2, 3
LONG, SHORT, WARM, FULL, OTHERS = (
    range(4, 6),
    range(6, 14),
    range(14, 18),
    range(20, 24),
    range(24, 28),
)


@dataclasses.dataclass
class Outcome:
    """The outcome of a misdeed in a pool."""

    job: str = ""
    process: str = ""
    beside: str = ""
    next_job: float = 0.0
    problems: list[str] = dataclasses.field(default_factory=list)
    output: str = ""


class _Cell:
    """Try a misdeed in a pool with that many slots."""

    def __init__(self, entry: Misdeed, pool: str, slots: int, path: Path, within: float) -> None:
        self.entry, self.pool, self.slots, self.within = entry, pool, slots, within
        self.end: End = entry.ends[pool]
        self.kind = "async" if pool == ASYNCIO else "sync"
        self.outcome = Outcome()
        self.counters = Counters(path / "counters")
        self.mill = declare(f"lmdb://{path}/store", self.counters)
        self.jobs: dict[int, Any] = {}
        self.mark = uuid.uuid4().hex
        self.limit = START

    # -- steps ----------------------------------------------------------------------------------

    def check(self, holds: bool, sentence: str) -> None:
        """Note a broken promise."""
        if not holds:
            self.outcome.problems.append(sentence)

    def enqueue(self, index: int, name: str, *args: int, kind: str = "", **options: Any) -> Any:
        """Enqueue a job with a row of its own."""
        task = self.mill.tasks[f"{name}.{kind or self.kind}"].using(**options)
        job = self.jobs[index] = task.enqueue(index, *args)
        return job

    def ended(self, *indexes: int) -> list[Record]:
        """Wait for the end of jobs; their records, ended or not."""
        ids = [self.jobs[index].id for index in indexes]
        records = self.mill.broker.wait_for(ids, self.limit)
        for index, record in zip(indexes, records, strict=True):
            self.check(record is not None, f"job {index} is lost")
            if record is None or not record.state.finished:
                self.limit = 1.0
        return [record for record in records if record is not None]

    def together(self, indexes: range, kind: str = "") -> None:
        """Have all slots run a job at a time."""
        row = range(indexes.start, indexes.start + self.slots)
        began = time.time()
        for index in row:
            self.enqueue(index, "together", row.start, row.stop, kind=kind)
        records = self.ended(*row)
        full = all(record.state is State.SUCCEEDED for record in records)
        seconds = time.time() - began
        self.check(full, f"not all of {self.slots} slots took {kind or self.kind} jobs")
        started = indexes is not WARM  # processes may be starting for the first jobs
        self.check(not started or seconds < self.within, f"all slots were full in {seconds:.1f} s")

    def run(self, worker: Worker) -> None:
        """All steps up to the end of the worker."""
        self.together(WARM)
        self.limit = min(self.limit, max(LIMIT, 2 * self.within))
        before = {child.pid for child in worker.children()}
        self.begin_long()
        record = self.misbehave()
        self.next_job()
        self.probe(worker)
        self.counters.release()
        if self.slots > 1:
            self.ended(*LONG)
        self.together(FULL)
        if self.pool != MAIN and self.slots > 1:
            self.together(OTHERS, "sync" if self.kind == "async" else "async")
        self.ended(*self.jobs)
        after = {child.pid for child in worker.children()}
        self.judge_process(record, before, after)

    def begin_long(self) -> None:
        """Long jobs of both kinds; in main threads both are sync."""
        if self.slots == 1:
            return
        other = "sync" if self.kind == "async" or self.pool == MAIN else "async"
        for index, kind in zip(LONG, (self.kind, other), strict=True):
            self.enqueue(index, "long", kind=kind)
        eventually(lambda: self.counters.together(LONG), "the long jobs begin", self.limit)

    def misbehave(self) -> Record | None:
        """The misdeed among short jobs; the record of its job."""
        for index in SHORT[:4]:
            self.enqueue(index, "short")
        self.enqueue(MISDEED, self.entry.name)
        for index in SHORT[4:]:
            self.enqueue(index, "short")
        with contextlib.suppress(AssertionError):  # the judge says so
            eventually(self.is_over, "the misdeed ends", self.limit, pause=0.03)
        records = self.ended(MISDEED)
        if not records:
            return None
        record = records[0]
        self.judge_job(record)
        return record

    def is_over(self) -> bool:
        """True once the misdeed's job has ended, or a long job runs again: jobs run alone then."""
        record = self.mill.broker.get(self.jobs[MISDEED].id)
        if any(self.counters.row(index).begins > 1 for index in LONG):
            self.counters.release()
            return True
        return record is None or record.state.finished

    def next_job(self) -> None:
        """The next job, timed."""
        began = time.time()
        self.enqueue(NEXT, "short")
        records = self.ended(NEXT)
        seconds = self.outcome.next_job = time.time() - began
        self.check(seconds < self.within, f"the next job ended after {seconds:.1f} s")
        good = bool(records) and records[0].state is State.SUCCEEDED
        self.check(good, f"the next job: {records[0].state if records else 'lost'}")

    def probe(self, worker: Worker) -> None:
        """Check that a timeout still interrupts a job, if the misdeed asks for a check."""
        if not self.entry.probe:
            return
        before = {child.pid for child in worker.children()}
        began = time.time()
        self.enqueue(OVERDUE, "overdue", retries=0)
        record = self.ended(OVERDUE)[0]
        self.check("JobTimeout" in record.error, f"a job past its timeout: {record.error!r}")
        seconds = time.time() - began
        self.check(seconds < 0.5 + self.within, f"a timeout took {seconds:.1f} s")
        self.enqueue(AFTER, "short")
        self.ended(AFTER)
        after = {child.pid for child in worker.children()}
        self.check(before == after, "a timeout cost a process")

    # -- judging --------------------------------------------------------------------------------

    def judge_job(self, record: Record) -> None:
        """The end of the misdeed's job."""
        row, end = self.counters.row(MISDEED), self.end
        error = record.error.partition("\n")[0]
        self.outcome.job = f"{record.state}: {error}" if error else str(record.state)
        self.check(record.state.finished, f"the misdeed's job is {record.state}")
        wrong = end.state and str(record.state) != end.state
        self.check(not wrong, f"the misdeed's job is {record.state}: {error[:300]}")
        self.check(end.error in record.error, f"the error is {error[:300]!r}, not {end.error!r}")
        # A process that gave up runs each of its jobs alone next.
        self.check(
            1 <= row.begins <= 1 + (end.dies or (not self.entry.timeout and end.interrupts)),
            f"the misdeed ran {row.begins} times",
        )
        late = record.finished - row.begun - (self.entry.timeout or 0.0)
        if end.dies or self.entry.timeout:
            self.check(late < self.within, f"the misdeed's job ended {late:.1f} s late")

    def judge_process(self, record: Record | None, before: set[int], after: set[int]) -> None:
        """Whether a process was replaced, and which jobs ran again."""
        kept, end = before == after, self.end
        self.outcome.process = "kept" if kept else "replaced"
        right = not end.process or end.process == self.outcome.process
        self.check(right, f"the process is {self.outcome.process}")
        again, counted = 0, 0
        for index in self.jobs:
            if index in (MISDEED, OVERDUE):
                continue
            again, counted = self._judge_neighbour(index, again, counted)
        how = "uncounted" if not counted else "with an attempt used"
        self.outcome.beside = f"run again, {how}" if again else "run once"

    def _judge_neighbour(self, index: int, again: int, counted: int) -> tuple[int, int]:
        row, end = self.counters.row(index), self.end
        record = self.mill.broker.get(self.jobs[index].id)
        if record is None:
            return again, counted  # noted by ``ended``
        what = f"job {index} ({record.envelope.task})"
        good = record.state is State.SUCCEEDED
        self.check(good, f"{what} is {record.state}: {record.error[:200]}")
        most = 2 if end.dies or end.interrupts else 1
        self.check(1 <= row.begins <= most, f"{what} ran {row.begins} times")
        attempts = 2 if end.dies else 1
        self.check(record.attempt <= attempts, f"{what} used {record.attempt} attempts")
        return again + (row.begins > 1), counted + (record.attempt > 1)

    def judge_end(self, worker: Worker) -> None:
        """The worker ends in time, with nothing left."""
        began = time.time()
        worker.send(signal.SIGTERM)
        code = worker.wait(SHUTDOWN + self.limit)
        seconds = time.time() - began
        self.check(code == 0, f"the worker ended with exit code {code}")
        self.check(seconds < SHUTDOWN + self.within, f"the worker's end took {seconds:.1f} s")
        with contextlib.suppress(AssertionError):
            eventually(lambda: not marked(self.mark), "the processes end", self.within)
        left = marked(self.mark)
        self.check(not left, f"processes are left: {left}")


def marked(mark: str) -> list[psutil.Process]:
    """All processes whose environment has the mark, but zombies."""
    found, text = [], mark.encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, psutil.Error):
            if text in Path(f"/proc/{name}/environ").read_bytes():
                found.append(psutil.Process(int(name)))
    return found


@contextlib.contextmanager
def _ending(mark: str) -> Iterator[None]:
    try:
        yield
    finally:
        for process in marked(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()


def try_misdeed(
    entry: Misdeed, pool: str, slots: int, path: Path, within: float = WITHIN
) -> Outcome:
    """Try one misdeed in one pool, in an empty folder; what happened."""
    (path / "abuse-tmp").mkdir(parents=True)
    with open_place(path) as place:
        place.app = "abuse.service"
        cell = _Cell(entry, pool, slots, path, within)
        env = {
            "ABUSE_URL": place.url,
            "ABUSE_COUNTERS": str(path / "counters"),
            "ABUSE_MARK": cell.mark,
            "PYTHONPATH": os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]),
            "TMPDIR": str(path / "abuse-tmp"),
        }
        processes = slots if pool == MAIN else 1
        with _ending(cell.mark):
            worker = place.worker(
                *("--shutdown-timeout", f"{SHUTDOWN:g}"),
                processes=processes,
                slots=slots // processes,
                env=env,
            )
            try:
                cell.run(worker.wait_ready())
                cell.judge_end(worker)
            except Exception as error:
                cell.check(False, f"{type(error).__name__}: {error}")
            cell.outcome.output = worker.output
        cell.mill.close()
    return cell.outcome
