"""Checks of schedules: those that do not fire, and those whose jobs fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.schedules import LAST_OWN
from tidemill.brokers.contract.store import Store
from tidemill.core.job import FINISHED, Record, State
from tidemill.doctor.findings import Finding, Seen
from tidemill.errors import CodecError
from tidemill.schedules import record as kept
from tidemill.schedules.declare import Schedule

_SINCE = 86_400.0  # a schedule is looked at when its task had a failure within these seconds
_TASKS_MOST, _LOOK = 10, 2000  # tasks whose latest jobs are read, and the jobs looked at


def schedules(seen: Seen) -> Iterator[Finding]:
    """Find schedules without a task or a worker, with a time too far away, or with a failed job."""
    if Feature.SCHEDULES not in seen.broker.features:
        return
    rows = [*seen.mill.schedules]
    unknown = [f"{row.name} ({row.task})" for row in rows if row.known is False]
    undeclared = [row.name for row in rows if row.undeclared]
    far = _too_far(seen.broker)
    remove = "tidemill schedule remove NAME"
    start = f"start a worker whose app has the task, or {remove}"
    set_back = "the clock was set back: a running worker sets the time within a minute"
    for names, problem, advice in (
        (unknown, "name a task that neither this app nor a worker has", start),
        (undeclared, "do not fire, since no worker declares them any more", remove),
        (far, "have a next time that is later than their rule says", set_back),
    ):
        if names:
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            problem = f"{len(names)} of {len(rows)} {problem}: {shown}"
            yield Finding("schedules", "warn", problem, advice)
    failed = _failed(seen.mill, rows)
    for name, job in failed.items():
        text = f"the latest job of schedule {name} {job.state}: {job.latest_error}"
        advice = f"tidemill job {job.envelope.id}"
        yield Finding("schedules", "warn", text, advice, schedule=name)
    if rows and not (unknown or undeclared or far or failed):
        yield Finding("schedules", "ok", f"{len(rows)} in the store")


def _too_far(broker: Store) -> list[str]:
    """The names of schedules whose next time lies beyond their rule, since the clock went back."""
    found, after, now = list[str](), LAST_OWN, broker.wall()
    while page := broker.list_schedules(after):
        after = page[-1].name
        for record in page:
            with contextlib.suppress(CodecError):  # another version wrote the record
                if kept.restored(record, now) is not None:
                    found.append(record.name)
    return found


def _failed(mill: Tidemill, rows: Sequence[Schedule]) -> dict[str, Record]:
    """Schedules whose latest ended job did not succeed, with this job."""
    # The jobs of a schedule have no index. So this looks at the latest jobs of the tasks that had
    # failures, and may miss a schedule whose task has very many other jobs.
    if not rows or Feature.HISTORY not in mill.broker.features:
        return {}
    tasks = {row.task for row in rows}
    history = mill.history.tasks(_SINCE, by=("task",))
    failing = [one.task for one in history if one.failed and one.task in tasks]
    latest: dict[str, Record] = {}
    for task in failing[:_TASKS_MOST]:
        what = Filter(states=FINISHED, task=task, look=_LOOK)
        for record in mill.broker.find(what, 200).records:
            planned = record.envelope.planned
            if planned is not None:
                latest.setdefault(planned.schedule, record)
    names = {row.name for row in rows}
    bad = {State.FAILED, State.EXPIRED}
    return {name: job for name, job in latest.items() if name in names and job.state in bad}
