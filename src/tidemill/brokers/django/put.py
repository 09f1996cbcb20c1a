"""Accept jobs: plain jobs by one statement without a lock, others by the memory broker's rules.

A plain job has no key, limit or links, and its queue has no bound. Such a put needs one INSERT,
which joins a caller's transaction and blocks nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from tidemill.brokers.django.jobs import StoredJobs
from tidemill.brokers.django.rows import kind_of
from tidemill.brokers.django.tables import Rows, in_parts
from tidemill.brokers.rules.due import check_due
from tidemill.brokers.rules.put import put as put_by_rules
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope, encode_envelope
from tidemill.core.job import Placed, Put

_NONCE = "nonce"  # the kind of rows of history that keep the answers to puts
_KEEP = 600.0  # seconds
_puts = msgspec.msgpack.Decoder(list[tuple[str, Placed]])

_ROWS = 500

_INSERT = (
    "INSERT INTO tidemill_job (id, queue, kind, state, rank, due, expires, alarm, token, holder, "
    'task, "key", share, linked, fresh, finished, envelope, facts, large{seq})'
)
_SELECT = """
SELECT id, queue, kind, CASE WHEN due > t THEN 1 ELSE 2 END, rank, due, lapse,
  CASE WHEN due > t THEN (CASE WHEN lapse > 0 AND lapse < due THEN lapse ELSE due END)
       WHEN lapse > 0 THEN lapse ELSE NULL END,
  0, '', task, '', '', 0, 1, 0, envelope, {empty}, {empty}{seq}
FROM (
  SELECT column1 AS id, column2 AS queue, column3 AS kind, column4 AS rank,
    CASE WHEN column5 > 0 THEN t + column5 ELSE column6 END AS due,
    CASE WHEN column7 > 0 THEN t + column7 ELSE 0 END AS lapse,
    column8 AS task, {envelope} AS envelope, column10 AS seq, t
  FROM {rows} CROSS JOIN (SELECT {now} AS t) AS clock
) AS jobs
WHERE NOT EXISTS (SELECT 1 FROM tidemill_store WHERE departs = 1)
  AND NOT EXISTS (
    SELECT 1 FROM tidemill_queue WHERE max_size > 0 AND tidemill_queue.name IN ({queues})
  )
"""


def is_plain(jobs: Sequence[Envelope], let_go: Collection[str]) -> bool:
    """True when one INSERT can accept the jobs, unless their queue has a bound."""
    if let_go or not jobs:
        return False
    return not any(job.key or job.links is not None or job.limit is not None for job in jobs)


def put_plainly(rows: Rows, jobs: Sequence[Envelope]) -> list[Put] | None:
    """Insert plain jobs; store nothing and return None when the rules must decide."""
    # The rules must decide when jobs move to another store, a queue has a bound, or an id is taken.
    stored: list[str] = []
    for part in in_parts(jobs, _ROWS):
        stored += _insert(rows, part)
        if len(stored) % _ROWS and len(stored) < len(jobs):
            break
    if len(stored) == len(jobs):
        return [Put(job.id, Placed.CREATED) for job in jobs]
    rows.send_in("DELETE FROM tidemill_job WHERE id IN", stored)
    return None


def _insert(rows: Rows, jobs: Sequence[Envelope]) -> list[str]:
    execute, dialect = rows.execute, rows.dialect
    numbers: list[Any] = [0] * len(jobs)
    by_hand = dialect.vendor == "mysql"
    if by_hand:
        numbers = dialect.numbers(execute, len(jobs))
    values = [
        (
            *(job.id, job.queue, kind_of(job), job.rank, job.delay, job.at, job.expires),
            *(job.task, encode_envelope(job), number),
        )
        for job, number in zip(jobs, numbers, strict=True)
    ]
    table, parameters = dialect.table_of(values)
    queues = list({job.queue for job in jobs})
    ahead = clock.server_ahead()
    now = f"{dialect.now} + {ahead!r}" if dialect.now else repr(clock.database())
    select = _SELECT.format(
        rows=table,
        now=now,
        envelope=dialect.blob.format("column9"),
        empty="''" if dialect.vendor != "sqlite" else "x''",
        seq=", seq" if by_hand else "",
        queues=", ".join(["%s"] * len(queues)),
    )
    insert = _INSERT.format(seq=", seq" if by_hand else "")
    found = execute(dialect.quick_insert(insert, select), [*parameters, *queues])
    return [row[0] for row in found]


def put_within(
    jobs: StoredJobs,
    envelopes: Sequence[Envelope],
    hold: Collection[str],
    let_go: Collection[str],
    nonce: str,
) -> list[Put]:
    """Accept jobs by the rules, all or none, in a transaction that excludes all other changes."""
    # Later puts with the same nonce get the answer of the first.
    rows = jobs.rows
    text = "SELECT sample FROM tidemill_history WHERE kind = %s AND name = %s AND at > %s"
    if nonce and (found := rows.execute(text, [_NONCE, nonce, int(jobs.now)])):
        return [Put(*one) for one in _puts.decode(bytes(found[0][0]))]
    jobs.check_here()
    jobs.need_ids([envelope.id for envelope in envelopes])
    jobs.need_ids(let_go)
    jobs.need_ids([i for one in envelopes if one.links for i in one.links.next])
    keys = [envelope.key for envelope in envelopes]
    jobs.need_keys(keys)
    for job_id in [i for key in keys if key for i in jobs.keys.get(key, ())]:
        check_due(jobs, jobs.items[job_id])  # many due jobs may not have moved yet
    jobs.queue_rows.need({one.queue for one in envelopes})
    jobs.reserve(len(envelopes))
    puts = put_by_rules(jobs, envelopes, hold, let_go)
    if nonce:
        answer = msgspec.msgpack.encode([(one.id, one.placed) for one in puts])
        rows.send("DELETE FROM tidemill_history WHERE kind = %s AND name = %s", [_NONCE, nonce])
        rows.insert(
            "tidemill_history",
            ("kind", "span", "at", "name", "counts", "sample"),
            [(_NONCE, 0, int(jobs.now + _KEEP) + 1, nonce, b"", answer)],
        )
    return puts


def put_again(jobs: StoredJobs, envelopes: Sequence[Envelope]) -> list[Put] | None:
    """The answer to a put whose first attempt may have been committed; None if it was not."""
    jobs.need_ids([envelope.id for envelope in envelopes])
    for envelope in envelopes:
        item = jobs.items.get(envelope.id)
        if item is None or item.record.envelope != envelope:
            return None
    return [Put(envelope.id, Placed.CREATED) for envelope in envelopes]


def forget_nonces(jobs: StoredJobs) -> None:
    text = "DELETE FROM tidemill_history WHERE kind = %s AND at <= %s"
    jobs.rows.send(text, [_NONCE, int(jobs.now)])
