"""Choose the next jobs for an owner by the index, and lease them by the memory broker's rules."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import msgspec

from tidemill.brokers.contract.exchange import Mode, Step, Want
from tidemill.brokers.django.dialects import Statement
from tidemill.brokers.django.jobs import StoredJobs
from tidemill.brokers.django.rows import SELECT
from tidemill.brokers.rules import claim as rules
from tidemill.brokers.rules import limits as limit_rules
from tidemill.brokers.rules.transitions import LOST, MESSAGES, TASKS, Item, Ready, ReadyList
from tidemill.core.job import Lease, Owner

# SQLite takes a partial index only if its condition, ``state <= 3``, is repeated.
_QUEUES = """
WITH RECURSIVE names AS (
  SELECT min(queue) AS name FROM tidemill_job WHERE state = 2 AND state <= 3
  UNION ALL
  SELECT (SELECT min(queue) FROM tidemill_job WHERE state = 2 AND state <= 3 AND queue > names.name)
  FROM names WHERE names.name IS NOT NULL
)
SELECT name FROM names WHERE name IS NOT NULL
"""
_NO_QUEUES = "SELECT name FROM tidemill_queue WHERE 1 = 0"
_LINES = """
WITH RECURSIVE lines (share, queue) AS (
  SELECT (SELECT min(share) FROM tidemill_job WHERE state = 2 AND share <> ''), CAST('' AS text)
  UNION ALL
  SELECT
    CASE WHEN EXISTS (SELECT 1 FROM tidemill_job AS job WHERE state = 2 AND job.share <> ''
           AND job.share = lines.share AND job.queue > lines.queue)
         THEN lines.share
         ELSE (SELECT min(job.share) FROM tidemill_job AS job WHERE state = 2 AND job.share <> ''
           AND job.share > lines.share) END,
    coalesce((SELECT min(job.queue) FROM tidemill_job AS job WHERE state = 2 AND job.share <> ''
      AND job.share = lines.share AND job.queue > lines.queue), '')
  FROM lines WHERE lines.share IS NOT NULL
)
"""
"""Each key of a limit with each queue that has ready jobs of the key."""
_OF_LINE = """
SELECT job.seq FROM tidemill_job AS job WHERE job.state = 2 AND job.share <> ''
  AND job.share = lines.share AND job.queue = lines.queue ORDER BY job.rank, job.seq LIMIT %s
"""
_FIRSTS = {
    "postgresql": f"{_LINES} SELECT firsts.seq FROM lines CROSS JOIN LATERAL ({_OF_LINE}) AS firsts"
    " WHERE lines.queue <> ''",
    "sqlite": f"{_LINES} SELECT whole.seq FROM lines CROSS JOIN tidemill_job AS whole"
    f" WHERE lines.queue <> '' AND whole.seq IN ({_OF_LINE})",
    "mysql": "SELECT seq FROM (SELECT seq, row_number() OVER "
    "(PARTITION BY share, queue ORDER BY rank, seq) AS place FROM tidemill_job "
    "WHERE state = 2 AND share <> '') AS placed WHERE place <= %s",
}
"""The first ready jobs of each key in each queue. Only MariaDB reads all jobs under limits."""
_LIST = "state = 2 AND state <= 3 AND queue = %s AND kind = %s"
_ORDER = "ORDER BY rank, seq LIMIT %s"


def asking_queues(want: Want | None) -> Statement:
    """The statement that names all queues with ready jobs, for an owner without named queues."""
    asks = want is not None and want.count and not want.queues
    return (_QUEUES if asks else _NO_QUEUES), ()


def read_ahead(
    jobs: StoredJobs, held: Sequence[Item], step: Step, stored: list[str] | None
) -> None:
    """Read, in one message, the rows of most exchanges: queues, numbers, first ready jobs."""
    # ``held`` are the running jobs that the step names. ``stored`` are the names of queues with
    # ready jobs, if these are known.
    want = step.want or Want(0)
    queues = [*(want.queues or stored or ())] if want.count else []
    names = {item.record.envelope.queue for item in held}.union(queues)
    asked = jobs.queue_rows.asking(names)
    count = len(asked)
    draw = jobs.rows.dialect.draw(want.count) if want.count else None
    follows = any(verdict.followers for verdict in step.verdicts)
    if len(queues) == 1 and not follows and _is_plain(jobs, want):
        asked += _asking_ready(jobs, queues[0], want)
        jobs.read_ahead = queues[0]
    answers = jobs.rows.execute_all([*asked, *([draw] if draw else [])])
    if draw:
        jobs.add_numbers([number for (number,) in answers.pop()])
    for found in answers[:count]:
        jobs.queue_rows.load(found)
    for found in answers[count:]:
        for row in found:
            jobs.enter_row(row)


def _is_plain(jobs: StoredJobs, want: Want) -> bool:
    """True when the next jobs are simply the first jobs of the ready lists."""
    return want.tasks and not jobs.facts.has_limits


def lease(jobs: StoredJobs, owner: Owner, want: Want, stored: list[str] | None) -> list[Lease]:
    """Lease up to ``want.count`` jobs."""
    # ``stored`` are the names of queues with ready jobs in the table, if they are known.
    if not want.count:
        return list(rules.lease(jobs, owner, want))
    queues = want.queues or _queues_with_jobs(jobs, stored)
    jobs.queue_rows.need(queues)
    jobs.reserve(want.count)
    if not _is_plain(jobs, want):
        for queue in queues:
            _read(jobs, queue, want)
        if jobs.facts.has_limits:
            need_limited(jobs, want.count)
        return list(rules.lease(jobs, owner, want))
    return _lease_plainly(jobs, owner, msgspec.structs.replace(want, queues=tuple(queues)))


def _queues_with_jobs(jobs: StoredJobs, stored: list[str] | None) -> list[str]:
    if stored is None:
        stored = [row[0] for row in jobs.rows.execute(_QUEUES, [])]
    here = [queue for (queue, _), entries in jobs.ready.items() if entries]
    return sorted({*stored, *here})


def _kinds(want: Want) -> list[int]:
    kinds = [TASKS] if want.tasks else []
    kinds += [LOST] if want.tasks and want.alone else []
    return [*kinds, MESSAGES] if want.messages else kinds


def _read(jobs: StoredJobs, queue: str, want: Want) -> None:
    """Read the first ready jobs of a queue, with all their facts."""
    if queue == jobs.read_ahead:
        return
    for found in jobs.rows.execute_all(_asking_ready(jobs, queue, want)):
        for row in found:
            jobs.enter_row(row)


def _asking_ready(jobs: StoredJobs, queue: str, want: Want) -> list[Statement]:
    text, touched = f"{SELECT}{_LIST} {_ORDER}", jobs.touched
    most = {LOST: 1 + touched}
    return [(text, [queue, kind, most.get(kind, want.count + touched)]) for kind in _kinds(want)]


def need_limited(jobs: StoredJobs, count: int = 1) -> None:
    """Read the first ready jobs of each key of each limit."""
    text = _FIRSTS[jobs.rows.dialect.vendor]
    firsts = [row[0] for row in jobs.rows.execute(text, [count + jobs.touched])]
    for row in jobs.rows.select_in(SELECT + "seq IN", firsts):
        jobs.enter_row(row)
    claims = [
        claim
        for entries in jobs.ready.values()
        for entry in entries
        if (claim := jobs.items[entry[2]].record.envelope.limit)
    ]
    jobs.partition_rows.need((claim.name, claim.key) for claim in claims)


def _lease_plainly(jobs: StoredJobs, owner: Owner, want: Want) -> list[Lease]:
    """Lease jobs by the ids in the ready lists, so that only the chosen jobs are read."""
    ready = jobs.ready
    if len(want.queues) == 1:
        _read(jobs, want.queues[0], want)
        jobs.ready = {line: [*entries] for line, entries in ready.items()}
    else:
        jobs.ready = _ready_lists(jobs, want)
    chosen: list[str] = []
    while len(chosen) < want.count and (job_id := rules.choose(jobs, want, first=not chosen)):
        chosen.append(job_id)
        next(line for line in jobs.ready.values() if line and line[0][2] == job_id).pop(0)
    jobs.ready = ready
    jobs.need_ids(chosen)
    items = [jobs.items[job_id] for job_id in chosen]
    inputs = [i for item in items if (links := item.record.envelope.links) for i in links.inputs]
    jobs.need_ids(inputs)
    return [rules.start_lease(jobs, item, owner) for item in items]


def _ready_lists(jobs: StoredJobs, want: Want) -> dict[ReadyList, list[Ready]]:
    """The first entries of the ready lists, with the changes of this transaction."""
    # A strict want needs no list after the queues that have enough jobs.
    text = f"SELECT rank, seq, id FROM tidemill_job WHERE {_LIST} {_ORDER}"
    lists: dict[ReadyList, list[Ready]] = {}
    left: float = want.count if want.mode is Mode.STRICT else math.inf
    for queue in want.queues:
        if (row := jobs.stats.get(queue)) and row.paused:
            continue
        kinds = _kinds(want) if left > 0 else [kind for kind in _kinds(want) if kind == LOST]
        for kind in kinds:
            most = (1 if kind == LOST else want.count) + jobs.touched
            found = map(tuple, jobs.rows.execute(text, [queue, kind, most]))
            stored = [entry for entry in found if not jobs.knows(entry[2])]
            known = jobs.ready.get((queue, kind), [])
            lists[queue, kind] = list(heapq.merge(stored, known))
            left -= len(lists[queue, kind]) if kind != LOST else 0
    return lists


def next_opening(jobs: StoredJobs) -> float:
    """Seconds until a closed limit opens for a ready job; infinity when no time opens a limit."""
    if not jobs.facts.has_limits:
        return math.inf
    need_limited(jobs)
    return limit_rules.next_opening(jobs)
