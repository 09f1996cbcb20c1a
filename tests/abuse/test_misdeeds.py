"""Each misdeed in one pool of a real worker; ``make abuse`` tries all pools.

1. All slots of a worker run a job at a time. Long jobs take slots beside the misdeed.
2. The misdeed runs among short jobs. Once its job has ended, the next job runs.
3. The long jobs end. All slots run a job at a time again.
4. The worker is told to stop. Nothing of it may be left.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import Place, Worker, eventually, open_place

from abuse.misdeeds import ASYNCIO, CATALOGUE, MAIN, THREADS, Misdeed
from tidemill.core.job import Record, State

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "misdeeds.md"

CELLS = ((THREADS, 4), (MAIN, 1), (MAIN, 4), (ASYNCIO, 1), (ASYNCIO, 4))
"""Pools and their slots. ``-c 1`` runs sync jobs in the main thread, so no pool has one thread.
Four slots of main threads are four processes."""

EVERYDAY = (
    *("fork_child_returns", "exits", "subtask_exits", "alarm_raises", "uses_up_descriptors"),
    *("reaches_memory_limit", "backtracks", "unprintable", "handler_raises", "closes_all"),
)


def cells() -> Iterator[Any]:
    """Each misdeed with one pool, a different one in turn; or with all pools."""
    for number, entry in enumerate(CATALOGUE.values()):
        known = [cell for cell in CELLS if cell[0] in entry.ends]
        few = [cell for cell in known if cell != (MAIN, 4)]
        chosen = known if "TIDEMILL_ALL_POOLS" in os.environ else [few[number % len(few)]]
        for pool, slots in chosen:
            yield pytest.param(entry, pool, slots, id=f"{entry.name}-{pool}-{slots}")


class Cell:
    """A pool with that many slots of a worker. Each job has a name, which is its id."""

    def __init__(self, place: Place, entry: Misdeed, pool: str, slots: int) -> None:
        self.place, self.entry, self.pool, self.slots = place, entry, pool, slots
        self.kind = "async" if pool == ASYNCIO else "sync"
        self.others = {"sync": "async", "async": "sync"}[self.kind] if pool != MAIN else "sync"
        self.jobs: dict[str, Any] = {}

    def enqueue(self, name: str, task: str, *args: Any, kind: str = "") -> Any:
        task = f"{task}.{kind or self.kind}"
        job = self.place.module.mill.tasks[task].using(id=name).enqueue(*args)
        self.jobs[name] = job
        return job

    def together(self, row: str, kind: str = "") -> None:
        """Have all slots run a job at a time."""
        names = [f"{row}-{number}" for number in range(self.slots)]
        jobs = [self.enqueue(name, "together", names, kind=kind) for name in names]
        assert {record.state for record in self.place.finish(jobs)} == {State.SUCCEEDED}

    def begins(self, name: str) -> int:
        """How often a job has begun, up to three times."""
        return sum((self.place.path / f"{name}.{run}").exists() for run in (1, 2, 3))

    def begin_long(self) -> None:
        """Long jobs of both kinds."""
        for name, kind in (("long-0", self.kind), ("long-1", self.others))[: self.slots - 1]:
            self.enqueue(name, "long", kind=kind)
            eventually(lambda name=name: self.begins(name), "the long job begins")

    def misbehave(self) -> Record:
        """The misdeed among short jobs; the record of its job."""
        for number in range(8):
            self.enqueue(f"short-{number}", "short")
            if number == 3:
                job = self.enqueue("misdeed", self.entry.name)
        eventually(lambda: self._is_over(job), "the misdeed ends")
        (record,) = self.place.finish([job])
        return record

    def _is_over(self, job: Any) -> bool:
        """True once the job has ended, or a long job runs again: jobs run alone then."""
        if any(self.begins(f"long-{number}") > 1 for number in range(2)):
            self.release()
            return True
        return bool(job.refresh().state.finished)

    def release(self) -> None:
        """Let the long jobs end."""
        (self.place.path / "go").touch()

    def probe(self, worker: Worker) -> None:
        """A timeout still interrupts a job."""
        before = {child.pid for child in worker.children()}
        (record,) = self.place.finish([self.enqueue("overdue", "overdue")])
        assert "JobTimeout" in record.error
        self.place.finish([self.enqueue("after", "short")])
        assert {child.pid for child in worker.children()} == before

    def check_misdeed(self, record: Record) -> None:
        end = self.entry.ends[self.pool]
        assert str(record.state) == end.state, record.error
        assert end.error in record.error
        # A process that gave up runs each of its jobs alone next.
        again = end.dies or (not self.entry.timeout and end.interrupts)
        assert 1 <= self.begins("misdeed") <= 1 + again

    def check_neighbours(self) -> None:
        """All other jobs succeed, and run again only if their process died under them."""
        end = self.entry.ends[self.pool]
        names = [name for name in self.jobs if name not in ("misdeed", "overdue")]
        records = self.place.finish([self.jobs[name] for name in names])
        for name, record in zip(names, records, strict=True):
            assert record.state is State.SUCCEEDED, (name, record.error)
            assert 1 <= self.begins(name) <= 1 + (end.dies or end.interrupts), name
            assert record.attempt <= 1 + end.dies, name


@contextlib.contextmanager
def ending(mark: str) -> Iterator[None]:
    """At the end no process has the mark in its environment."""

    def marked() -> list[psutil.Process]:
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, psutil.Error):
                if mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(psutil.Process(int(name)))
        return found

    try:
        yield
        eventually(lambda: not marked(), "the processes end")
    finally:
        for process in marked():
            with contextlib.suppress(psutil.Error):
                process.kill()


@pytest.mark.everyday(*EVERYDAY)
@pytest.mark.parametrize(("entry", "pool", "slots"), [*cells()])
def test_a_worker_serves_on_after_a_misdeed(
    tmp_path: Path, entry: Misdeed, pool: str, slots: int
) -> None:
    # given a worker whose slots have all run a job, and jobs that still run
    mark = uuid.uuid4().hex
    with ending(mark), open_place(tmp_path) as place:
        place.write("from abuse.app import declare\ndeclare(mill, HERE)\n")
        processes = slots if pool == MAIN else 1
        env = {"PYTHONPATH": str(TESTS), "ABUSE_MARK": mark}
        worker = place.worker(processes=processes, slots=slots // processes, env=env)
        cell = Cell(place, entry, pool, slots)
        cell.together("warm")
        before = {child.pid for child in worker.children()}
        cell.begin_long()
        # when a task does the misdeed
        record = cell.misbehave()
        # then its job ends as the catalogue says, and the next job runs
        cell.check_misdeed(record)
        place.finish([cell.enqueue("next", "short")])
        if entry.probe:
            cell.probe(worker)
        # and all other jobs run, also in all slots at a time
        cell.release()
        cell.together("full")
        if pool != MAIN and slots > 1:
            cell.together("others", cell.others)
        cell.check_neighbours()
        process = "kept" if {child.pid for child in worker.children()} == before else "replaced"
        assert entry.ends[pool].process in ("", process)
        assert worker.stop() == 0


@pytest.mark.everyday
def test_the_page_shows_each_misdeed_of_the_catalogue() -> None:
    rows = [line.split(" | ")[0][2:] for line in PAGE.read_text().splitlines() if line[:2] == "| "]
    assert rows == ["misdeed", *(entry.title for entry in CATALOGUE.values())]
