"""The page of outcomes, made from a run of the whole catalogue."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from abuse.catalogue import Misdeed, catalogue
from abuse.rig import CELLS, Outcome

PAGE = Path(__file__).parent.parent.parent / "docs" / "misdeeds.md"
Results = dict[tuple[str, str, int], Outcome]

HEAD = """# Misdeeds of tasks

A task can fork, exit, block, or use up the limits of its process. This page shows what each misdeed
costs: its own job, its process, the jobs beside it, and the time until the next job has run. The
last rows show the rule for all other damage: a task that breaks its interpreter costs its process,
and the jobs beside it go back uncounted. `make abuse` wrote this page. The run tries each misdeed
in a real worker on LMDB.

Pools of this run: {pools}. The main thread runs the jobs of a worker with `-c 1`; four main
threads are four processes (`-p 4 -c 1`). {workers} workers ran at a time on {cores} cores, so the
seconds include waits for a core.

- **Its job**: the state in which the job of the misdeed ended, and its error. The job had no
retries.
- **Its process**: *kept*, or *replaced* by a new process.
- **Jobs beside it**: how often the jobs ran that were in the same worker.
- **Next job**: seconds until a job that was enqueued after the misdeed had run; the longest of all.
"""


def page(results: Results, workers: int) -> str:
    """The page as text, of a run with so many workers at a time."""
    pools = sorted({f"{pool} x {slots}" for _, pool, slots in results})
    head = HEAD.format(pools=", ".join(pools), workers=workers, cores=os.cpu_count())
    parts = [
        head,
        "| misdeed | pools | its job | its process | jobs beside it | next job |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in catalogue().items():
        outcomes = {key[1:]: value for key, value in results.items() if key[0] == name}
        if not outcomes:
            parts.append(f"| {entry.title} | none in this run | | | | |")
            continue
        columns = (
            entry.title,
            _pools(entry, outcomes),
            _column(outcomes, lambda outcome: _plain(outcome.job)),
            _column(outcomes, lambda outcome: outcome.process),
            _column(outcomes, lambda outcome: outcome.beside),
            f"{max(outcome.next_job for outcome in outcomes.values()):.1f} s",
        )
        parts.append("| " + " | ".join(columns) + " |")
    return "\n".join(parts) + "\n"


def titles(text: str) -> list[str]:
    """The misdeeds that a page shows."""
    rows = [line.split(" | ")[0][2:] for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row != "misdeed"]


def _column(outcomes: dict[tuple[str, int], Outcome], of: Callable[[Outcome], str]) -> str:
    """Return the value on which all pools agree; else each value with its pools."""
    pools: dict[str, list[str]] = {}
    for (pool, slots), outcome in outcomes.items():
        pools.setdefault(of(outcome), []).append(f"{pool} x {slots}")
    if len(pools) == 1:
        return next(iter(pools))
    return "<br>".join(f"{value} ({_names(names)})" for value, names in pools.items())


def _pools(entry: Misdeed, outcomes: dict[tuple[str, int], Outcome]) -> str:
    """The pools in which the misdeed was tried."""
    possible = [cell for cell in CELLS if cell[0] in entry.ends]
    if len(outcomes) == len(possible):
        return "all" if len(possible) == len(CELLS) else "asyncio"
    return _names(f"{pool} x {slots}" for pool, slots in outcomes)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)


def _plain(job: str) -> str:
    """A job's end without what differs from run to run."""
    job = re.sub(r"worker process \d+", "worker process", job)
    job = re.sub(r"0x[0-9a-f]+", "0x…", job).replace("|", "\\|")
    job = "".join(c if c.isprintable() else "…" for c in job)
    return job if len(job) <= 120 else job[:117] + "…"
