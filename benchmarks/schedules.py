"""What schedules cost between firings, and how late many that are due at once are.

    python benchmarks/schedules.py [URL]

- *wake-ups*: how often the threads of an idle worker, supervisor and processes, gave up the
  processor of their own accord (``voluntary_ctxt_switches``) in 30 s, with no schedules and with
  10,000 that are due tomorrow.
- *at once*: 1,000 schedules due at one instant. From that instant until the last of their jobs was
  stored, by the worker's log, and until the last had begun.
- *alone*: 100 schedules, one about every 100 ms: the start of the job minus the time it was for.

A URL ends where the name of a store is put, as in ``redis://host/0?prefix=``; without one each
store is a folder of LMDB's.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tidemill import Filter, Tidemill
from tidemill.core.envelope import Planned
from tidemill.core.job import Record
from tidemill.schedules import record as stored
from tidemill.schedules.rules import Rule

APP = """
from tidemill import Tidemill
mill = Tidemill({url!r})

@mill.task
def nothing(): pass
"""
LOOK = 30.0
TOMORROW = 86_400.0


@contextlib.contextmanager
def worker(url: str, threads: int = 4) -> Iterator[tuple[Tidemill, subprocess.Popen[bytes], Path]]:
    """An app on a fresh store, a worker that serves it, and its log."""
    with tempfile.TemporaryDirectory() as folder:
        at = url + Path(folder).name if url else f"lmdb://{folder}/store"
        (Path(folder) / "bench.py").write_text(APP.format(url=at))
        log = Path(folder) / "log"
        with Tidemill(at, allow_imports=["bench.*"]) as mill, log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "tidemill", "worker", "bench:mill", "-c", str(threads)],
                cwd=folder,
                env={**os.environ, "TIDEMILL_LOG": "DEBUG"},
                stderr=out,
            )
            try:
                while b" serves " not in log.read_bytes():
                    time.sleep(0.05)
                yield mill, process, log
            finally:
                process.terminate()
                process.wait(30)


def switches(pid: int) -> int:
    """How often all threads of a process and its children gave up the processor."""
    parent = psutil.Process(pid)
    count = 0
    for process in (parent, *parent.children(recursive=True)):
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            lines = status.read_text().splitlines()
            count += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))
    return count


def wake_ups(url: str, count: int) -> int:
    """Of an idle worker in ``LOOK`` seconds, beside so many schedules."""
    with worker(url) as (mill, process, _):
        add(mill, [time.time() + TOMORROW] * count)
        time.sleep(5)
        before = switches(process.pid)
        time.sleep(LOOK)
        return switches(process.pid) - before


def add(mill: Tidemill, times: list[float]) -> None:
    """A schedule for each of these times."""
    call, now = mill.call("bench.nothing"), time.time()
    job = mill.runtime.envelope(call)
    job.id = ""
    changes = []
    for n, at in enumerate(times):
        job.planned = Planned(f"s{n}")
        changes.append(stored.added(f"s{n}", stored.Stored(rule=Rule(at=at), job=job), now))
    for n in range(0, len(changes), 1000):
        mill.broker.change_schedules(changes[n : n + 1000])


def last_fired(log: Path) -> float:
    """When the worker had stored the last of what fired."""
    line = [line for line in log.read_text().splitlines() if "schedule(s) fired" in line][-1]
    stamp = " ".join(line.split()[:2]).replace(",", ".")
    return dt.datetime.fromisoformat(stamp).timestamp()


def records(mill: Tidemill, count: int) -> list[Record]:
    """All jobs, once so many have ended."""
    while True:
        found: list[Record] = []
        cursor = ""
        while True:
            page = mill.jobs(Filter()).page(limit=1000, cursor=cursor)
            found += page.records
            cursor = page.cursor
            if not cursor:
                break
        if sum(record.state.finished for record in found) >= count:
            return found
        time.sleep(0.2)


def at_once(url: str, count: int) -> tuple[float, float]:
    """Seconds from the due time until the last job was put, and until the last had begun."""
    with worker(url) as (mill, _, log):
        at = time.time() + 5  # long enough to add them on a busy machine
        add(mill, [at] * count)
        assert time.time() < at - 1
        found = records(mill, count)
        assert len({r.envelope.planned.schedule for r in found if r.envelope.planned}) == count
        assert len(found) == count
        put = last_fired(log)
    return put - at, max(record.attempts[0].started for record in found) - at


def alone(url: str, count: int) -> list[float]:
    """Seconds by which jobs began later than they were planned."""
    with worker(url) as (mill, _, _):
        at = time.time() + 3
        add(mill, [at + n * 0.0997 for n in range(count)])
        found = records(mill, count)
    return sorted(r.attempts[0].started - r.envelope.planned.time for r in found)  # type: ignore[union-attr]


def main(url: str = "", *parts: str) -> None:
    """Print all figures, or those of the parts named."""
    for count in (0, 10_000) if not parts or "idle" in parts else ():
        print(f"wake-ups in {LOOK:g} s beside {count:,} schedules: {wake_ups(url, count)}")
    for turn in range(5) if not parts or "once" in parts else ():
        put, begun = (1000 * seconds for seconds in at_once(url, 1000))
        print(f"{turn} 1,000 at once: stored after {put:.0f} ms, begun after {begun:.0f} ms")
    if not parts or "alone" in parts:
        late = [1000 * seconds for seconds in alone(url, 100)]
        print(f"alone: p50 {statistics.median(late):.1f} ms, p99 {late[-2]:.1f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
