"""Bounds of answers with many jobs: a job may have 1 MiB, so 1,000 jobs would have a gigabyte.

Jobs that do not fit go back to their queues, and no attempt is counted. A list of large jobs ends
early, and its cursor continues the list.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.inspection import Filter, Page
from tidemill.brokers.contract.rpc import encode
from tidemill.brokers.contract.store import Store
from tidemill.client.search import find_shown
from tidemill.core.job import Outcome, Record, Verdict
from tidemill.server.waiters import ANSWER_BYTES, MAX_BATCH, MIN_BATCH, BatchSize, size_of

OWNERS = 10_000  # owners whose batch sizes are remembered
AT_ONCE = 100  # jobs of a list that the broker is asked for at a time


class SizedExchanges:
    """The exchanges of remote owners with one broker, from any thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._batches: OrderedDict[str, BatchSize] = OrderedDict()

    def exchange(self, step: Step) -> Reply:
        """One exchange, with as many leases as fit into an answer; others are given back."""
        want = step.want
        if want is None or not want.count:
            return self._broker.exchange(step)
        batch = self._batch_of(step.owner)
        count = min(want.count, batch.count)
        fewer = msgspec.structs.replace(want, count=count)
        reply = self._broker.exchange(msgspec.structs.replace(step, want=fewer))
        has_more = len(reply.leases) == count < want.count
        batch.learn(reply.leases)
        fit = how_many_fit([size_of(lease) for lease in reply.leases])
        if fit < len(reply.leases):
            self._give_back(step.owner, [lease.token for lease in reply.leases[fit:]])
            del reply.leases[fit:]
            has_more = True
        if has_more:
            reply.more, reply.next_due = True, 0.0  # the owner asks again at once
        return reply

    def _batch_of(self, owner: str) -> BatchSize:
        with self._lock:
            batch = self._batches.setdefault(owner, BatchSize(few=True))
            self._batches.move_to_end(owner)
            if len(self._batches) > OWNERS:
                self._batches.popitem(last=False)
            return batch

    def _give_back(self, owner: str, tokens: Sequence[int]) -> None:
        verdicts = [Verdict(token, Outcome.RELEASE) for token in tokens]
        self._broker.exchange(Step(owner, verdicts, behalf=True))


def how_many_fit(sizes: Sequence[int]) -> int:
    """The number of items after which an answer is full; all of them if it is not."""
    for n, size in enumerate(itertools.accumulate(sizes), 1):
        if size >= ANSWER_BYTES:
            return n
    return len(sizes)


def records_that_fit(
    ids: Sequence[str], read: Callable[[Sequence[str]], list[Record | None]]
) -> tuple[list[str], bytes]:
    """The ids of unfinished jobs, and the first records, encoded, as many as fit."""
    unfinished: list[str] = []
    parts: list[bytes] = []
    left, at, count = ANSWER_BYTES, 0, MIN_BATCH
    while at < len(ids):
        some = ids[at : at + count]
        records = read(some)
        pairs = zip(some, records, strict=True)
        unfinished += [i for i, record in pairs if record and not record.state.finished]
        for record in records:
            if left > 0:
                parts.append(encode(record))
                left -= len(parts[-1])
        size = sum(size_of_record(record) for record in records if record)
        count = max(MIN_BATCH, min(MAX_BATCH, ANSWER_BYTES * len(some) // max(size, 1)))
        at += len(some)
    head = b"\xdd" + len(parts).to_bytes(4, "big")  # of a msgpack list
    return unfinished, head + b"".join(parts)


def find_some(
    find: Callable[[Filter, int, str], Page], what: Filter, limit: int, cursor: str
) -> Page:
    """Up to ``limit`` jobs; fewer when they are large, but at least one if any job matches."""
    records: list[Record] = []
    left = ANSWER_BYTES
    while True:
        count = min(limit - len(records), AT_ONCE)
        page = find(what, count, cursor)
        sizes = [size_of_record(record) for record in page.records]
        fit = sum(total <= left for total in itertools.accumulate(sizes))
        if fit < len(page.records):
            if fit or not records:
                page = find(what, max(fit, 1), cursor)  # read fewer jobs, to get the right cursor
                records, cursor = records + page.records, page.cursor
            return Page(records, cursor)
        records += page.records
        left -= sum(sizes)
        cursor = page.cursor
        if not cursor or len(page.records) < count or len(records) >= limit:
            return Page(records, cursor)


def find_with_bodies(store: Store, what: Filter, limit: int, cursor: str) -> Page:
    """A page of jobs with their bodies. Whole jobs are read one at a time: results may be large."""
    page = find_shown(store, what, limit, cursor)
    for record in page.records:
        whole = store.get(record.envelope.id)
        record.envelope = whole.envelope if whole is not None else record.envelope
    return page


def size_of_record(record: Record) -> int:
    """The approximate number of bytes of a record."""
    envelope = record.envelope
    texts = [*envelope.headers, *envelope.headers.values(), *envelope.tags, envelope.text]
    texts += [text for attempt in record.attempts for text in (attempt.error, attempt.traceback)]
    texts += [record.error, *(line for _, line in record.log)]
    return len(envelope.body) + len(record.raw_result) + sum(map(len, texts))
