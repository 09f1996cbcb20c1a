"""Jobs that wait for other jobs. The step that ends a job counts down its dependents.

``pending`` and ``failures`` of a job always count the jobs before it, also after it has ended. So
when a failed job is made ready again, its dependents wait again, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tidemill.brokers.contract.dependencies import check_links, not_waiting
from tidemill.brokers.rules.transitions import Item, Jobs
from tidemill.core.envelope import Envelope, Links
from tidemill.core.job import Input, RunOn, State

_HOW = {State.FAILED: "failed", State.CANCELLED: "was cancelled", State.EXPIRED: "expired"}


def refuse_any(jobs: Jobs, envelopes: Sequence[Envelope], let_go: Collection[str]) -> None:
    """Refuse links to jobs that are missing or no longer wait, before anything is stored."""
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
    """Count a new job at its dependents, and hold the job back if it waits for other jobs."""
    if item.waits:
        item.record.pending += 1  # one more until ``let_go``: it may get more predecessors
    for job_id in item.dependents:
        if job_id in jobs.items and jobs.items[job_id].record.state is State.WAITING:
            jobs.items[job_id].record.pending += 1


def let_go(jobs: Jobs, job_id: str) -> None:
    """Let a held job go: all jobs before it have been put."""
    _count_down(jobs, job_id, "", ok=True)


def ended(jobs: Jobs, item: Item) -> None:
    """Count down the dependents of a job that has ended or was deleted."""
    if item.dependents:
        jobs.ended.append(item)
        if not jobs.flowing:
            flow(jobs)


def flow(jobs: Jobs) -> None:
    """Count down the dependents of all ended jobs, and of jobs that end because of them."""
    jobs.flowing = True
    while jobs.ended:
        item = jobs.ended.pop(0)
        state = item.record.state
        why = f"not run, since job {item.record.envelope.id} {_HOW.get(state, 'was deleted')}"
        for job_id in item.dependents:
            _count_down(jobs, job_id, why, ok=state is State.SUCCEEDED)
    jobs.flowing = False


def _count_down(jobs: Jobs, job_id: str, why: str, *, ok: bool) -> None:
    item = jobs.items.get(job_id)
    if item is None or not item.waits:  # the dependent is gone, or another job has its id now
        return
    record = item.record
    record.pending = max(0, record.pending - 1)
    record.failures += not ok
    if record.state is not State.WAITING:
        return
    if item.waits == RunOn.SUCCESS and record.failures:
        item.dropped = True
        jobs.finish(item, State.CANCELLED, why)
    elif not record.pending:
        _begin(jobs, item)


def _begin(jobs: Jobs, item: Item) -> None:
    """Start a job whose predecessors have all ended."""
    record = item.record
    if item.waits == RunOn.BARRIER:
        item.dropped = bool(record.failures)
        if record.failures:
            jobs.finish(item, State.FAILED, f"{record.failures} of its jobs did not succeed")
        else:
            jobs.finish(item, State.SUCCEEDED)
    elif item.waits == RunOn.FAILURE and not record.failures:
        jobs.forget(item)
    else:
        jobs.move(item, *jobs.due_of(record.envelope))


def revive(jobs: Jobs, item: Item) -> None:
    """Make dependents that ended because of this job wait again, since it runs again."""
    revived = [item]
    while revived:
        for job_id in revived.pop().dependents:
            dependents = jobs.items.get(job_id)
            if dependents is None or not dependents.waits:
                continue
            record = dependents.record
            record.pending += 1
            record.failures = max(0, record.failures - 1)
            if dependents.dropped and (not record.failures or dependents.waits == RunOn.BARRIER):
                dependents.dropped = False
                jobs.wait_again(dependents)
                revived.append(dependents)


def may_wait_anew(item: Item) -> bool:
    """False for a job that can only end as before, because of how the jobs before it ended."""
    if item.waits == RunOn.BARRIER:
        return not item.dropped
    return item.waits != RunOn.SUCCESS or not item.record.failures


def wait_anew(jobs: Jobs, item: Item) -> None:
    """Make an ended job wait again for the jobs before it; start it if all of these have ended."""
    jobs.wait_again(item)
    if not item.record.pending:
        _begin(jobs, item)


def is_needed(jobs: Jobs, item: Item) -> bool:
    """True while a dependent has not ended, and may need the result of this job."""
    # The dependents of a barrier may need the results of all jobs before the barrier.
    dependents = [jobs.items[job_id] for job_id in item.dependents if job_id in jobs.items]
    return any(
        not other.record.state.finished or (other.waits == RunOn.BARRIER and is_needed(jobs, other))
        for other in dependents
    )


def inputs_of(jobs: Jobs, item: Item) -> tuple[Input, ...]:
    links = item.record.envelope.links
    return tuple(_input(jobs, job_id) for job_id in links.inputs) if links is not None else ()


def _input(jobs: Jobs, job_id: str) -> Input:
    item = jobs.items.get(job_id)
    if item is None:
        return Input(job_id)
    record = item.record
    return Input(job_id, record.state.value, record.raw_result, record.error)
