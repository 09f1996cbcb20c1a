"""The table: one line a figure, one column a system, medians, and how tidemill compares."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from systems import FLOORS

_FLOOR_TITLES = {
    "lmdb": "bare LMDB, put + commit /s",
    "evalsha": "bare EVALSHA round trip /s",
    "insert": "bare INSERT + commit /s",
    "pika-floor": "bare publish + confirm /s",
}


class Line(NamedTuple):
    """One figure: where it is found and which direction is better."""

    title: str
    measure: str
    value: str
    form: str = ",.0f"
    less_is_better: bool = False


LINES = (
    Line("enqueue one by one /s", "single", "rate"),
    Line("enqueue in bulk /s", "bulk", "rate"),
    Line("enqueue async, 100 at once /s", "async", "rate"),
    Line("enqueue from 16 threads /s", "threads", "rate"),
    Line("start latency p50 ms", "latency", "p50", ",.2f", True),
    Line("start latency p99 ms", "latency", "p99", ",.2f", True),
    Line("{burst:,} due at once: p50 late ms", "burst", "p50", ",.0f", True),
    Line("{burst:,} due at once: p99 late ms", "burst", "p99", ",.0f", True),
    Line("due alone: p99 late ms", "alone", "p99", ",.1f", True),
    Line("idle CPU, % of a core", "idle", "cpu", ",.2f", True),
    Line("memory of all workers, USS MB", "idle", "uss", ",.0f", True),
    Line("memory of all workers, PSS MB", "idle", "pss", ",.0f", True),
    Line("memory of the largest, USS MB", "idle", "largest", ",.0f", True),
)


class Results:
    """The figures of all runs: (measure, system) → run → values."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
        self.errors: dict[tuple[str, str], str] = {}
        self.versions: dict[str, str] = {}

    def add(self, measure: str, system: str, run: int, answer: dict[str, Any]) -> None:
        """Take in one answer of the driver."""
        if "version" in answer:
            self.versions[system] = answer["version"]
        if "values" in answer:
            self.values.setdefault((measure, system), {})[run] = answer["values"]
        elif "error" in answer:
            self.errors[measure, system] = answer["error"]

    def median(self, measure: str, system: str, value: str) -> float | None:
        """The median over the runs, None where there is nothing."""
        runs = self.values.get((measure, system), {})
        found = [run[value] for run in runs.values() if value in run]
        return statistics.median(found) if found else None

    def ratio(self, line: Line, ours: str, peer: str) -> float | None:
        """How many times better ``ours`` is: the median of the ratios within each run."""
        left = self.values.get((line.measure, ours), {})
        right = self.values.get((line.measure, peer), {})
        pairs = [
            (left[run][line.value], right[run][line.value])
            for run in left.keys() & right
            if line.value in left[run]
            and line.value in right[run]
            # Who starts too early is not late: there is nothing to compare.
            and not left[run].get("early")
            and not right[run].get("early")
        ]
        if line.less_is_better:
            pairs = [(theirs, mine) for mine, theirs in pairs]
        if not pairs or any(each <= 0 for pair in pairs for each in pair):
            return None
        return statistics.median(top / bottom for top, bottom in pairs)

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "versions": self.versions,
            "runs": [
                {"measure": measure, "system": system, "run": run, **values}
                for (measure, system), runs in self.values.items()
                for run, values in runs.items()
            ],
            "errors": [
                {"measure": measure, "system": system, "error": error}
                for (measure, system), error in self.errors.items()
            ],
        }


def lines_for(drains: Iterable[int], burst: int) -> list[Line]:
    """All lines, with one for each size of backlog."""
    sized = [
        line
        for jobs in drains
        for line in (
            Line(f"drain {jobs:,} jobs /s", f"drain {jobs}", "rate"),
            Line("  until all are settled /s", f"drain {jobs}", "settled"),
        )
    ]
    fixed = [line._replace(title=line.title.format(burst=burst)) for line in LINES]
    return [*fixed[:4], *sized, *fixed[4:]]


def render(results: Results, systems: list[str], lines: list[Line]) -> str:
    """The table as text; a ratio says how many times better tidemill is than that column."""
    ours = systems[0]
    rows = [["", *systems]]
    for line in lines:
        if any(results.median(line.measure, each, line.value) is not None for each in systems):
            rows.append([line.title, *(_cell(results, line, ours, each) for each in systems)])
        for name, floor in FLOORS.items() if line.measure == "single" else ():
            if name in systems and ("single", floor) in results.values:
                row = [""] * len(rows[0])
                row[0] = f"  {_FLOOR_TITLES[floor]}"
                row[1 + systems.index(name)] = _cell(results, line, name, floor)
                rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([text[0], "─" * max(map(len, text)), *text[1:], *_remarks(results)])


def _cell(results: Results, line: Line, ours: str, system: str) -> str:
    if (found := results.median(line.measure, system, line.value)) is None:
        return "error" if (line.measure, system) in results.errors else "-"
    cell = format(found, line.form)
    if line.measure.startswith("drain") and _partial(results, line.measure, system):
        cell += "*"
    ratio = results.ratio(line, ours, system) if system != ours else None
    return f"{cell} ({ratio:.3g}x)" if ratio else cell


def _partial(results: Results, measure: str, system: str) -> bool:
    runs = results.values.get((measure, system), {})
    return any(run["ran"] < run["of"] for run in runs.values())


def _remarks(results: Results) -> list[str]:
    remarks = []
    if any(_partial(results, *key) for key in results.values if key[0].startswith("drain")):
        remarks.append("* the time budget ended first; the rate is that of the jobs that ran")
    for (measure, system), runs in results.values.items():
        if (more := max(run.get("ran", 0) - run.get("of", 0) for run in runs.values())) > 0:
            remarks.append(f"twice: {system} ran {more:.0f} jobs too many ({measure})")
        if early := max(run.get("early", 0) for run in runs.values()):
            remarks.append(
                f"early: {system} started {early:.0f} delayed jobs too early ({measure})"
            )
    remarks += [
        f"error: {system}, {measure}: {error}"
        for (measure, system), error in results.errors.items()
    ]
    return ["", *remarks] if remarks else []
