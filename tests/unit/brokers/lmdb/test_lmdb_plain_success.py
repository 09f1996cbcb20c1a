"""The straight line of a plain success writes what the general settle writes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdb_desk import Sleeper, job
from moved_clock import MovedClock

from tidemill.brokers.contract.broker import SMALL_RESULT
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.lmdb.settle import PlainSuccess
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.core.job import Lease, Note, Outcome, Verdict
from tidemill.core.retry import RetryPolicy

pytestmark = pytest.mark.everyday

straight_settle = PlainSuccess.settle


class Store:
    """A broker with a worker and a consumer, and the leases that they hold."""

    def __init__(self, folder: Path) -> None:
        broker = open_broker(f"lmdb://{folder}?durability=relaxed&keep=30&keep_count=3")
        self.broker = broker
        self.owners = Sleeper(broker, "w"), Sleeper(broker, "c", kind="consumer")
        self.held: tuple[list[Lease], list[Lease]] = [], []

    def take(self) -> None:
        for owner, held, kind in zip(self.owners, self.held, ("tasks", "messages"), strict=True):
            wants = {"tasks": False, "messages": False} | {kind: True}
            held += owner.exchange(want=Want(4, **wants))

    def settle(self, which: int, count: int, verdict: Callable[[int], Verdict]) -> list[bool]:
        """Settle the first leases of an owner, and a lease that nobody has."""
        tokens = [lease.token for lease in self.held[which][:count]]
        del self.held[which][:count]
        verdicts = [verdict(token) for token in [*tokens, 10**6]]
        reply = self.broker.exchange(Step(self.owners[which].name, verdicts))
        assert not reply.settled.pop()
        return reply.settled

    def content(self) -> dict[str, Any]:
        """All records of all tables."""
        store = self.broker._store
        tables = store.tables._asdict()
        with store.env.begin() as txn:
            found: dict[str, Any] = {name: list(txn.cursor(each)) for name, each in tables.items()}
            names = {store.prefix.encode() + name.encode() for name in tables}
            found["main"] = [(key, value) for key, value in txn.cursor() if key not in names]
        return found


Action = Callable[[Store, str], Any]


def put(fields: dict[str, Any]) -> Action:
    return lambda store, new: store.broker.put([job(id=new, **fields)])


def take(store: Store, _: str) -> None:
    store.take()


def settle(which: int, count: int, fields: dict[str, Any]) -> Action:
    return lambda store, _: store.settle(which, count, lambda token: Verdict(token, **fields))


def rerun(store: Store, _: str) -> Any:
    ids = [record.envelope.id for record in store.broker.find(Filter(), 50).records]
    return store.broker.retry(ids, force=True)


def cancel(store: Store, _: str) -> Any:
    return store.broker.cancel([lease.open().id for held in store.held for lease in held][:1])


def note(store: Store, _: str) -> None:
    notes = [Note(lease.token, line="half done", time=1.8e9) for lease in store.held[0][:1]]
    store.owners[0].exchange(notes=notes)


PLAIN = {"rank": st.sampled_from([100, 200]), "queue": st.sampled_from(["a", "b"])}
MORE: dict[str, st.SearchStrategy[Any]] = {
    "task": st.just(""),
    "key": st.sampled_from(["k", "l"]),
    "delay": st.just(2.0),
    "expires": st.just(50.0),
    "result_ttl": st.just(60.0),
    "timeout": st.just(7.0),
    "limit": st.just(JobLimit("l", terms=LimitSettings(concurrency=2))),
    "retries": st.just(RetryPolicy(0)),
}
SPECIAL = st.builds(
    lambda plain, more: {**plain, **more},
    st.fixed_dictionaries(PLAIN),
    st.one_of([st.fixed_dictionaries({name: each}) for name, each in MORE.items()]),
)
TIMES = {"started": st.sampled_from([0.0, 1.8e9]), "ended": st.just(1.8e9 + 0.5)}
SUCCESS = {
    "outcome": st.just(int(Outcome.SUCCESS)),
    "result": st.sampled_from([b"", b"", b"1", b"x" * (SMALL_RESULT + 1)]),
    "rank": st.sampled_from([-1, -1, 50]),
    **TIMES,
}
OTHER = {
    "outcome": st.sampled_from([int(each) for each in Outcome]),
    "error": st.sampled_from(["", "no"]),
    "delay": st.sampled_from([0.0, 3.0]),
    **TIMES,
}
FOLLOWED = {**SUCCESS, "followers": st.builds(lambda: (job(id="next"),))}
VERDICTS = st.one_of([st.fixed_dictionaries(each) for each in (SUCCESS, SUCCESS, OTHER, FOLLOWED)])
SETTLES = st.builds(settle, st.sampled_from([0, 0, 1]), st.integers(1, 4), VERDICTS)
RARE = st.sampled_from(
    [
        None,
        rerun,
        cancel,
        note,
        lambda store, _: store.broker.set_queue("a", max_size=50),
        lambda store, _: store.broker.set_limit("b", LimitSettings(concurrency=2), queue=True),
    ]
)
PUTS = st.one_of(st.fixed_dictionaries(PLAIN), SPECIAL).map(put)


def in_turn(*actions: Action) -> Action:
    return lambda store, new: [action(store, new) for action in actions]


RUNS = st.builds(
    lambda put, settle: in_turn(put, take, settle),
    PUTS,
    st.builds(settle, st.integers(0, 1), st.integers(1, 4), VERDICTS),
)
RERUNS = st.builds(
    lambda settle: in_turn(rerun, take, settle), st.builds(settle, st.just(0), st.just(4), VERDICTS)
)
ACTIONS = st.one_of(PUTS, RUNS, RUNS, RUNS, SETTLES, RERUNS, RARE)


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=15, max_size=50))
def test_a_plain_success_writes_the_bytes_of_the_general_settle(
    tmp_path_factory: pytest.TempPathFactory, actions: list[Action | None]
) -> None:
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as last:
        time = MovedClock(patch, speed=0.0, wall=1.8e9)
        stores = Store(folder / "one"), Store(folder / "other")
        for store in stores:
            last.callback(store.broker.close)
        for action in actions:
            if action is None:  # time passes
                time.advance(20)
                continue
            new, answers = new_id(), []
            for store, how in zip(stores, (straight_settle, lambda *_: False), strict=True):
                patch.setattr(PlainSuccess, "settle", how)
                random.seed(1)  # for the backoff of messages
                answers.append(action(store, new))
            assert answers[0] == answers[1]
            assert stores[0].content() == stores[1].content()


def test_a_plain_success_goes_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    store.broker.put([job()])
    store.take()
    # when no general settle is possible
    monkeypatch.setattr("tidemill.brokers.lmdb.settle._settle", None)
    # then the success is settled all the same
    assert store.settle(0, 1, lambda token: Verdict(token, Outcome.SUCCESS)) == [True]
    store.broker.close()
