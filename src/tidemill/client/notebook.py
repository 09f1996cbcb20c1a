"""How handles look in a notebook: tables for jobs, groups and queues, and the chart of a queue.

A notebook shows the state of the handle at the moment when the cell runs.
"""

from __future__ import annotations

import datetime as dt
import html
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from tidemill.brokers.contract.inspection import QueueStats
from tidemill.client.history_numbers import QueueNumbers
from tidemill.core.clock import clock
from tidemill.core.errors import InvalidOption, TidemillError
from tidemill.core.job import Record

_TEXT_MOST = 2000
_LEFT = 'style="text-align:left"'


def html_table(handle: object, read: Callable[[], dict[str, str]]) -> str:
    """The facts of a handle as a table without empty rows.

    Showing a handle never raises: when the store cannot be read, it is the text of the handle.
    """
    try:
        facts = read()
    except (TidemillError, OSError) as error:
        return f"<code>{html.escape(repr(handle))}</code> <small>{html.escape(str(error))}</small>"
    lines = [
        f"<tr><th {_LEFT}>{name}</th><td {_LEFT}>{html.escape(text[:_TEXT_MOST])}</td></tr>"
        for name, text in facts.items()
        if text
    ]
    return f"<table>{''.join(lines)}</table>"


def job_facts(record: Record) -> dict[str, str]:
    """What a notebook shows of a job."""
    envelope, most = record.envelope, record.max_attempts
    done, total = record.progress or ("", 0)
    succeeded = record.state.value == "succeeded" and record.raw_result
    return {
        "job": envelope.id,
        "task": f"{envelope.task}({envelope.text})" if envelope.task else "message",
        "state": str(record.state),
        "queue": envelope.queue,
        "attempts": f"{record.current_attempt} of {most}" if most else str(record.current_attempt),
        "progress": f"{done} of {total}" if total else str(done),
        "doing": record.progress_text,
        "error": record.latest_error,
        "created": _ago(envelope.created),
        "finished": _ago(record.finished),
        "result": repr(record.result) if succeeded else "",
    }


def queue_facts(rows: Iterable[QueueStats], name: str) -> dict[str, str]:
    """What a notebook shows of a queue; ``rows`` are the queues of the store."""
    row = next((row for row in rows if row.name == name), QueueStats(name=name))
    names = ("ready", "running", "scheduled", "waiting", "succeeded", "failed")
    counts = {name: f"{getattr(row, name):,}" for name in names if name not in row.unknown}
    paused = " (paused)" if row.paused else ""
    return {"queue": name + paused, **counts, "oldest ready": _ago(row.oldest)}


def _ago(moment: float) -> str:
    gone = max(0, round(clock.wall() - moment))
    return f"{dt.timedelta(seconds=gone)} ago" if moment else ""


def plot(numbers: QueueNumbers, ax: Any) -> Any:
    """Draw the history of a queue with matplotlib; as ``Queue.plot``."""
    try:
        plt: Any = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        raise InvalidOption("plot() needs matplotlib: pip install matplotlib") from None
    if ax is None:
        _, ax = plt.subplots(figsize=(9, 3))
    at = [dt.datetime.fromtimestamp(point.at) for point in numbers.points]
    for name in ("accepted", "succeeded", "failed"):
        ax.plot(at, [getattr(point, name) for point in numbers.points], label=name)
    unit = "minute" if numbers.span == 60 else "hour"
    ax.set(title=f"queue {numbers.queue}", ylabel=f"jobs a {unit}", ylim=(0, None))
    ax.legend(loc="upper left")
    ax.figure.autofmt_xdate()
    return ax
