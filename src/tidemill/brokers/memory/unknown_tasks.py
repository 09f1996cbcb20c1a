"""Jobs of unknown tasks: set aside, brought back for a worker that knows the task, and shown."""

from __future__ import annotations

import heapq

from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.unknown_tasks import MOST_NAMED, UnknownTask
from tidemill.brokers.memory.part import Part
from tidemill.brokers.memory.transitions import Item, Jobs
from tidemill.core.job import Outcome, State


def set_aside(jobs: Jobs, item: Item, grace: float) -> None:
    """Set a job aside, by its task. The job fails after ``grace`` seconds, if any."""
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
    """True when a step sets jobs aside, whose tasks other owners may know."""
    return any(verdict.outcome == Outcome.UNKNOWN for verdict in step.verdicts)


def bring_back(jobs: Jobs, want: Want) -> list[tuple[Item, float]]:
    """Make jobs ready whose tasks the owner knows: the first ``want.count`` of each queue.

    Returns each job with the machine time at which the job would have failed.
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


def undo(jobs: Jobs, want: Want, back: list[tuple[Item, float]]) -> bool:
    """Set aside again the jobs that were not leased. Return True if a job stays ready.

    Jobs under a limit stay ready: the timer of a limit finds ready jobs only. If the owner takes no
    tasks, lost tasks stay ready, too: another owner leases them.
    """
    left = False
    for item, until in back:
        record = item.record
        if record.state is State.READY:
            if limited(jobs, item) or (record.losses and not want.tasks):
                left = True
            else:
                set_aside(jobs, item, until - jobs.now if until else 0.0)
    return left


def limited(jobs: Jobs, item: Item) -> bool:
    """True when the job has a limit, or its queue has one."""
    envelope = item.record.envelope
    return envelope.limit is not None or envelope.queue in jobs.queue_limits


def tell(jobs: Jobs, want: Want | None, reply: Reply) -> None:
    """If the owner asks, name the tasks with jobs set aside that no earlier reply has named."""
    if want is None or want.told < 0:
        return
    numbered = sorted((number, task) for task, number in jobs.unknown_numbers.items())
    new = [(number, task) for number, task in numbered if number > want.told]
    reply.unknown = [task for _, task in new[:MOST_NAMED]]
    reply.told = new[:MOST_NAMED][-1][0] if new else want.told
    if len(new) > MOST_NAMED:
        reply.next_due = 0.0


def show(jobs: Jobs) -> list[UnknownTask]:
    """The tasks with jobs set aside, by name."""
    shown = []
    for task, items in sorted(jobs.unknown.items()):
        queues = sorted({item.record.envelope.queue for item in items})
        oldest = min(items, key=lambda item: item.record.seq).record.envelope.created
        shown.append(UnknownTask(task, queues, len(items), oldest))
    return shown


class UnknownTasks(Part):
    """The call that shows jobs set aside."""

    def unknown_tasks(self) -> list[UnknownTask]:
        with self._lock:
            return show(self._jobs)
