"""Jobs that wait for others: counted down when those end, in the same step.

``pending`` and ``failures`` of a job always tell how those before it stand, also after it has ended
itself; so a failed job that is made ready again gives those behind it another chance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidemill.brokers.links import check_links, not_waiting
from tidemill.brokers.memory.jobs import Item, Jobs
from tidemill.job import Envelope, Input, Links, State, Waits

__all__ = ["ended", "enlist", "flow", "inputs_of", "is_needed", "let_go", "refuse_any", "revive"]

_HOW = {
    State.FAILED: "failed",
    State.CANCELLED: "was cancelled",
    State.EXPIRED: "expired",
}


def refuse_any(jobs: Jobs, envelopes: Sequence[Envelope], let_go: Collection[str]) -> None:
    """Refuse links to what is not there, or waits for nothing more; before anything is stored."""
    coming: set[str] = set()
    named: list[str] = list(let_go)
    for job in envelopes:
        check_links(job)
        links = job.links or Links()
        named += [job_id for job_id in links.next if job_id not in coming]
        if links.waits:
            coming.add(job.id)
    for job_id in named:
        item = jobs.items.get(job_id)
        if item is None or not item.waits or item.record.state is not State.WAITING:
            raise not_waiting(job_id)


def enlist(jobs: Jobs, item: Item) -> None:
    """A job was put: those behind it wait for one more, and it is held if it waits itself."""
    if item.waits:
        item.record.pending += 1  # until it is let go
    for job_id in item.behind:
        if job_id in jobs.items and jobs.items[job_id].record.state is State.WAITING:
            jobs.items[job_id].record.pending += 1


def let_go(jobs: Jobs, job_id: str) -> None:
    """Nothing more is to come before this job."""
    _count_down(jobs, job_id, "", ok=True)


def ended(jobs: Jobs, item: Item) -> None:
    """A job has ended, or was deleted before: those behind it wait for one less."""
    if item.behind:
        jobs.ended.append(item)
        if not jobs.flowing:
            flow(jobs)


def flow(jobs: Jobs) -> None:
    """Count down behind all that has ended, and behind what ends for that."""
    jobs.flowing = True
    while jobs.ended:
        item = jobs.ended.pop(0)
        state = item.record.state
        why = f"not run, since job {item.record.envelope.id} {_HOW.get(state, 'was deleted')}"
        for job_id in item.behind:
            _count_down(jobs, job_id, why, ok=state is State.SUCCEEDED)
    jobs.flowing = False


def _count_down(jobs: Jobs, job_id: str, why: str, *, ok: bool) -> None:
    item = jobs.items.get(job_id)
    if item is None or not item.waits:  # gone, or its id is another's now
        return
    record = item.record
    record.pending = max(0, record.pending - 1)
    record.failures += not ok
    if record.state is not State.WAITING:
        return
    if item.waits == Waits.SUCCESS and record.failures:
        item.dropped = True
        jobs.finish(item, State.CANCELLED, why)
    elif not record.pending:
        _begin(jobs, item)


def _begin(jobs: Jobs, item: Item) -> None:
    """All before it have ended."""
    record = item.record
    if item.waits == Waits.BARRIER:
        item.dropped = bool(record.failures)
        if record.failures:
            jobs.finish(item, State.FAILED, f"{record.failures} of its jobs did not succeed")
        else:
            jobs.finish(item, State.SUCCEEDED)
    elif item.waits == Waits.FAILURE and not record.failures:
        jobs.forget(item)
    else:
        jobs.move(item, *jobs.due_of(record.envelope))


def revive(jobs: Jobs, item: Item) -> None:
    """A job that had not succeeded is to run again: those that ended for that wait again."""
    revived = [item]
    while revived:
        for job_id in revived.pop().behind:
            behind = jobs.items.get(job_id)
            if behind is None or not behind.waits:
                continue
            record = behind.record
            record.pending += 1
            record.failures = max(0, record.failures - 1)
            if behind.dropped and (not record.failures or behind.waits == Waits.BARRIER):
                behind.dropped = False
                jobs.wait_again(behind)
                revived.append(behind)


def is_needed(jobs: Jobs, item: Item) -> bool:
    """True while a job behind this one has not ended: its result must not be pruned.

    What is behind a barrier is behind all that is before it.
    """
    behind = [jobs.items[job_id] for job_id in item.behind if job_id in jobs.items]
    return any(
        not other.record.state.finished or (other.waits == Waits.BARRIER and is_needed(jobs, other))
        for other in behind
    )


def inputs_of(jobs: Jobs, item: Item) -> tuple[Input, ...]:
    """How the jobs ended whose results this one is given."""
    links = item.record.envelope.links
    return tuple(_input(jobs, job_id) for job_id in links.inputs) if links is not None else ()


def _input(jobs: Jobs, job_id: str) -> Input:
    item = jobs.items.get(job_id)
    if item is None:
        return Input(job_id)
    record = item.record
    return Input(job_id, record.state.value, record.result, record.error)
