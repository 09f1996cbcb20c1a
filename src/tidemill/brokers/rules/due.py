"""Due times: jobs that come due, expire or time out, and finished jobs to prune."""

from __future__ import annotations

import heapq

from tidemill.brokers.rules.settle import close_attempt
from tidemill.brokers.rules.transitions import Item, Jobs
from tidemill.brokers.rules.workflows import is_needed
from tidemill.core.job import Outcome, State, Verdict, is_purged
from tidemill.core.retry import BY_POLICY
from tidemill.core.verdicts import TOO_LATE


def come_due(jobs: Jobs) -> None:
    if jobs.sealed:
        return
    for heap, now in ((jobs.due, jobs.now), (jobs.due_wall, jobs.wall)):
        while heap and heap[0][0] <= now:
            _, _, job_id = heapq.heappop(heap)
            if job_id in jobs.items:
                check_due(jobs, jobs.items[job_id])


def check_due(jobs: Jobs, item: Item) -> None:
    """Move a job whose entry is due, as the job's state requires. Stale entries do nothing."""
    record, now = item.record, jobs.now
    if record.state is State.RUNNING:
        if item.deadline and item.deadline <= now:
            error = "ttr passed without an ack"
            late = Verdict(item.token, Outcome.RETRY, error=error, ended=jobs.wall)
            late.delay = BY_POLICY
            close_attempt(jobs, item, late)
    elif record.state.finished:
        return
    elif item.expires_machine and item.expires_machine <= now:
        jobs.finish(item, State.EXPIRED, TOO_LATE)
    elif record.state is State.SCHEDULED and jobs.left(record.due, item.due_machine) <= 0:
        jobs.move(item, record.due, item.due_machine)


def prune(jobs: Jobs) -> None:
    """Delete finished jobs that are too old, and surplus jobs if the store has too many."""
    if jobs.sealed:
        return
    now, finished = jobs.now, jobs.finished
    while jobs.linked and jobs.linked[0][0] <= now:
        item = jobs.items[jobs.linked.pop(0)[1]]
        if is_needed(jobs, item):
            jobs.keep_linked(item, jobs.retention.protect)
        else:
            jobs.keep_plainly(item)
    while finished and finished[0][0] <= now:
        del jobs.items[finished.pop(0)[1]]
    if len(finished) <= jobs.retention.count:
        return
    done = [entry for entry in finished if _counts(jobs, entry[1])]
    surplus = max(0, len(done) - jobs.retention.count)
    plain = [
        (when, job_id)
        for when, job_id in done
        if _state(jobs, job_id) is State.SUCCEEDED and not jobs.items[job_id].record.raw_result
    ]
    old = now - jobs.retention.protect
    results = [e for e in done if e not in plain and jobs.items[e[1]].finished_machine <= old]
    for entry in (plain + results)[:surplus]:
        finished.remove(entry)
        del jobs.items[entry[1]]


def _counts(jobs: Jobs, job_id: str) -> bool:
    """False for failed and purged jobs, which are deleted only by age."""
    return _state(jobs, job_id) is not State.FAILED and not is_purged(
        jobs.items[job_id].record.error
    )


def _state(jobs: Jobs, job_id: str) -> State:
    return jobs.items[job_id].record.state
