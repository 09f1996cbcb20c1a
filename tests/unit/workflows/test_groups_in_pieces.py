"""Groups that are put in several pieces, and producers that die between two of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from tidemill import Ended, JobGroup, State, Tidemill, chain, group, map_many
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.compositions import MEMBER_COUNT, group_results
from tidemill.core.codec import pack
from tidemill.core.job import GROUP, Record
from tidemill.errors import BadSignature
from tidemill.testing import run_all
from tidemill.workflows import enqueue

PIECE = 20


class Killed(BaseException):
    """Stands for a kill: the producer does nothing after it."""


class Producer:
    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self.ended: list[Ended] = []
        self.inc = mill.task(name="inc")(inc)
        self.total = mill.task(name="total")(total)

        @mill.task(name="hook")
        def hook(ended: Ended) -> None:
            self.ended.append(ended)

        self.hook = hook

    def calls(self, count: int, *, dies: bool = False) -> Iterator[Any]:
        for number in range(count):
            yield self.inc.call(number)
        if dies:
            raise Killed

    def enqueue_and_die(self, monkeypatch: pytest.MonkeyPatch, composition: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(enqueue, "cancel_incomplete", lambda *_: None)
            with pytest.raises(Killed):
                self.mill.enqueue(composition)


@pytest.fixture
def producer(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> Producer:
    monkeypatch.setattr(enqueue, "JOBS_PER_PUT", PIECE)
    return Producer(mill)


@pytest.mark.parametrize("source", ["iterator", "sized"])
def test_a_group_whose_producer_died_waits_until_it_is_cancelled(
    producer: Producer, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    # case C2
    class Numbers(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(1030)
            raise Killed

    members = map_many(producer.inc, Numbers([0] * 1100))
    if source == "iterator":
        members = group(producer.calls(1030, dies=True))
    whole = chain(members.on_complete(producer.hook), producer.total).on_failure(producer.hook)
    producer.enqueue_and_die(monkeypatch, whole.using(id="w"))
    run_all(producer.mill, scheduled=True)
    barrier: JobGroup[Any] = producer.mill.group("w.0000")
    assert barrier.state is State.WAITING
    assert producer.ended == []

    barrier.cancel()
    run_all(producer.mill)
    assert barrier.state is State.CANCELLED
    assert producer.mill.job("w").state is State.CANCELLED
    assert sorted(end.id for end in producer.ended) == ["w", "w.0000"]
    assert not any(end.succeeded for end in producer.ended)
    assert not list(producer.mill.jobs(state=["waiting", "scheduled", "ready", "running"]))


def test_a_group_in_pieces_stores_its_members_and_one_job_that_counts_them(
    producer: Producer,
) -> None:
    handle = producer.mill.enqueue(group(producer.calls(1100)))
    accepted = {row.name: row.accepted for row in producer.mill.broker.stats() if row.accepted}
    assert accepted == {"default": 1100, "tidemill.groups": 2}  # the group, and the number
    run_all(producer.mill)
    assert handle.state is State.SUCCEEDED


def test_a_group_that_fits_one_put_is_never_held(producer: Producer) -> None:
    handle = producer.mill.enqueue(group(producer.calls(PIECE - 3)))
    run_all(producer.mill)
    assert handle.state is State.SUCCEEDED


def inc(number: int) -> int:
    return number + 1


def total(numbers: list[int]) -> int:
    return sum(numbers)


class Forged:
    """A store of one group in which somebody has changed the record that has the count."""

    def __init__(self, mill: Tidemill, **changes: Any) -> None:
        self._broker = mill.broker
        self._changes = changes

    def wait_for(self, ids: Sequence[str], timeout: float) -> list[Record | None]:
        records = self._broker.wait_for(ids, timeout)
        for record in records:
            if record is not None and MEMBER_COUNT in record.envelope.headers:
                record.envelope = msgspec.structs.replace(record.envelope, **self._changes)
        return records


@pytest.mark.parametrize("count", [2, PIECE + 2])
def test_the_number_of_members_of_a_group_is_signed(
    make_mill: Any, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:  # case M12, case S4
    # given a group that is an argument, put at once or in pieces
    monkeypatch.setattr(enqueue, "JOBS_PER_PUT", PIECE)
    producer = Producer(make_mill(secret_keys=["k"]))
    mill = producer.mill
    small, whole = (group(producer.calls(size)) for size in (1, count))
    [other, handle] = [mill.enqueue(chain(it, producer.total)) for it in (small, whole)]
    run_all(mill)
    assert handle.result(0) == count * (count + 1) // 2
    parts = (r.envelope for r in mill.broker.find(Filter(task=GROUP)).records)
    by_id = {e.id: e for e in parts}
    group_id = next(i for i in by_id if i.startswith(handle.id) and not i.endswith(MEMBER_COUNT))
    # when its header is changed, then the results stay
    store: Any = Forged(mill, headers={MEMBER_COUNT: "1"})
    assert len(group_results(store, group_id, keys=mill.runtime.keys)) == count
    # when its body is, or the whole record, then they are refused
    stolen = next(
        e for i, e in by_id.items() if i.startswith(other.id) and MEMBER_COUNT in e.headers
    )
    for changes in ({"body": pack([[], {MEMBER_COUNT: 1}])}, msgspec.structs.asdict(stolen)):
        store = Forged(mill, **changes)
        with pytest.raises(BadSignature):
            group_results(store, group_id, keys=mill.runtime.keys)
