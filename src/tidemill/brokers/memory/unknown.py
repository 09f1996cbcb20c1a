"""Jobs of unknown tasks: set aside, brought back for a worker that knows the task, and shown."""

from __future__ import annotations

import heapq

from tidemill.brokers.base import Reply, Step, Want
from tidemill.brokers.memory.jobs import Item, Jobs
from tidemill.brokers.unknown import TOLD_MOST, UnknownTask
from tidemill.job import Outcome, State

__all__ = ["bring_back", "came", "limited", "set_aside", "show", "tell", "undo"]


def set_aside(jobs: Jobs, item: Item, grace: float) -> None:
    """Out of everything, into the index by task. The job fails after ``grace`` seconds, if any."""
    record = item.record
    jobs.unplace(item)
    record.due, item.due_machine = jobs.due_after(grace)
    record.state, record.unknown = State.SCHEDULED, True
    jobs.number_unknown(record.envelope.task)
    jobs.unknown[record.envelope.task].append(item)
    if grace > 0:
        jobs.look_at(item, item.due_machine)
    jobs.count(item, +1)


def came(step: Step) -> bool:
    """Whether a step sets jobs aside, which others may know."""
    return any(verdict.outcome == Outcome.UNKNOWN for verdict in step.verdicts)


def bring_back(jobs: Jobs, want: Want) -> list[tuple[Item, float]]:
    """Make the first jobs ready that a want knows: as many of each queue as it has room for.

    Each comes with the machine time at which it would have failed.
    """
    found = [item for task in dict.fromkeys(want.knows) for item in jobs.unknown.get(task, [])]
    if not found:
        return []
    queues = want.queues or dict.fromkeys(item.record.envelope.queue for item in found)
    back: list[tuple[Item, float]] = []
    for queue in queues:
        mine = [item for item in found if item.record.envelope.queue == queue]
        if not mine or jobs.queue(queue).paused:
            continue
        first = heapq.nsmallest(want.count, mine, lambda item: (item.record.rank, item.record.seq))
        back += [(item, item.due_machine) for item in first]
    for item, _ in back:
        jobs.move(item, 0.0, 0.0)
    return back


def undo(jobs: Jobs, want: Want, back: list[tuple[Item, float]]) -> None:
    """Set aside again what was not leased; jobs under a limit stay in their line.

    There the clock of the limit looks for them. So do suspects that only a relay may bring.
    """
    for item, until in back:
        record = item.record
        stays = limited(jobs, item) or (record.losses and not want.tasks)
        if record.state is State.READY and not stays:
            set_aside(jobs, item, until - jobs.now if until else 0.0)


def limited(jobs: Jobs, item: Item) -> bool:
    """Whether any limit concerns a job."""
    envelope = item.record.envelope
    return envelope.limit is not None or envelope.queue in jobs.queue_limits


def tell(jobs: Jobs, want: Want | None, reply: Reply) -> None:
    """Name the tasks with jobs set aside that are new to an owner that asks."""
    if want is None or want.told < 0:
        return
    numbered = sorted((number, task) for task, number in jobs.unknown_numbers.items())
    new = [(number, task) for number, task in numbered if number > want.told]
    reply.unknown = [task for _, task in new[:TOLD_MOST]]
    reply.told = new[:TOLD_MOST][-1][0] if new else want.told
    if len(new) > TOLD_MOST:
        reply.next_due = 0.0


def show(jobs: Jobs) -> list[UnknownTask]:
    """Return the jobs set aside, by task."""
    shown = []
    for task, items in sorted(jobs.unknown.items()):
        queues = sorted({item.record.envelope.queue for item in items})
        oldest = min(items, key=lambda item: item.record.seq).record.envelope.created
        shown.append(UnknownTask(task, queues, len(items), oldest))
    return shown
