"""How much one answer to an owner on another machine carries: as much as an answer of ``reserve``.

A job may have 1 MiB, so 1,000 of them would be an answer of a gigabyte. An owner is leased fewer
when its jobs are large. What does not fit goes back uncounted, and the owner asks again at once.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from tidemill.brokers.base import Broker, Reply, Step
from tidemill.brokers.calls import encode
from tidemill.job import Outcome, Record, Verdict
from tidemill.server.asks import ENOUGH, FEWEST, MOST, Portion, size_of
from tidemill.server.listing import size_of_record

__all__ = ["Portions", "fitting", "look_at"]

OWNERS = 10_000
"""Owners whose portions are remembered."""


class Portions:
    """The exchanges of owners elsewhere with one broker, from any thread."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._portions: OrderedDict[str, Portion] = OrderedDict()

    def exchange(self, step: Step) -> Reply:
        """One exchange, with as many leases as fit into an answer.

        Raises:
            TidemillError: the broker says so, or what does not fit could not be given back. Then
                the step is repeated, and its leases are handed out once more.
        """
        want = step.want
        if want is None or not want.count:
            return self._broker.exchange(step)
        portion = self._portion(step.owner)
        count = min(want.count, portion.count)
        fewer = msgspec.structs.replace(want, count=count)
        reply = self._broker.exchange(msgspec.structs.replace(step, want=fewer))
        has_more = len(reply.leases) == count < want.count
        portion.learn(reply.leases)
        fit = fitting([size_of(lease) for lease in reply.leases])
        if fit < len(reply.leases):
            self._give_back(step.owner, [lease.token for lease in reply.leases[fit:]])
            del reply.leases[fit:]
            has_more = True
        if has_more:
            reply.more, reply.next_due = True, 0.0  # the owner asks again at once
        return reply

    def _portion(self, owner: str) -> Portion:
        with self._lock:
            portion = self._portions.setdefault(owner, Portion(few=True))
            self._portions.move_to_end(owner)
            if len(self._portions) > OWNERS:
                self._portions.popitem(last=False)
            return portion

    def _give_back(self, owner: str, tokens: Sequence[int]) -> None:
        verdicts = [Verdict(token, Outcome.RELEASE) for token in tokens]
        self._broker.exchange(Step(owner, verdicts, behalf=True))


def fitting(sizes: Sequence[int]) -> int:
    """How many of these an answer carries: those before it has enough, and one at least."""
    for n, size in enumerate(itertools.accumulate(sizes), 1):
        if size >= ENOUGH:
            return n
    return len(sizes)


def look_at(
    ids: Sequence[str], read: Callable[[Sequence[str]], list[Record | None]]
) -> tuple[list[str], bytes]:
    """Which of these jobs have not ended; the records of the first ones, as many as fit.

    Records are read a few at a time: those of all may take more memory than there is.
    """
    going_on: list[str] = []
    parts: list[bytes] = []
    left, at, at_once = ENOUGH, 0, FEWEST
    while at < len(ids):
        some = ids[at : at + at_once]
        records = read(some)
        pairs = zip(some, records, strict=True)
        going_on += [i for i, record in pairs if record and not record.state.finished]
        for record in records:
            if left > 0:
                parts.append(encode(record))
                left -= len(parts[-1])
        size = sum(size_of_record(record) for record in records if record)
        at_once = max(FEWEST, min(MOST, ENOUGH * len(some) // max(size, 1)))
        at += len(some)
    return going_on, _list_of(parts)


def _list_of(parts: Sequence[bytes]) -> bytes:
    """A list in msgpack of what is encoded already."""
    return b"\xdd" + len(parts).to_bytes(4, "big") + b"".join(parts)
