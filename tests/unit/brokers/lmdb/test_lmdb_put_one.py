"""The put of one plain job: it writes what the general put writes, and takes part in every race."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmdb_desk import Process, Sleeper, job
from moved_clock import MovedClock

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.lmdb import transfer
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine.wakeup import COMMITTED, LEASED, LOOK, bloom
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.core.job import Outcome, State, Verdict
from tidemill.core.retry import RetryPolicy
from tidemill.errors import TidemillError

pytestmark = pytest.mark.everyday

Action = Callable[["Store", str], Any]
"""Acts on a store; the text is a new id, the same for both stores."""


class Store:
    """A broker with three owners, who sleep or take jobs."""

    def __init__(self, folder: Path, *, straight: bool) -> None:
        broker = open_broker(f"lmdb://{folder}?durability=relaxed")
        self.broker = broker
        self.owners = [Sleeper(broker, name) for name in ("u", "v", "w")]
        if not straight:
            run = broker._store.commits.run
            broker._store.commits.run = functools.partial(_generally, run)  # type: ignore[method-assign]

    def take(self, which: int, room: int, queues: tuple[str, ...] = (), **want: Any) -> list[str]:
        """Take jobs as a worker does: it looks again if the first look took any."""
        taken: list[str] = self.owners[which].take(room, queues, **want)
        return taken + self.owners[which].take(room - len(taken), queues, **want)

    def do(self, action: Action, new: str) -> Any:
        """The answer of an action, or its error, and who was hinted."""
        try:
            answer = action(self, new)
        except TidemillError as error:
            answer = type(error), str(error)
        return answer, [owner.hinted() for owner in self.owners]

    def content(self) -> dict[str, Any]:
        """All records of all tables, and the places to sleep."""
        store = self.broker._store
        tables = store.tables._asdict()
        with store.env.begin() as txn:
            found: dict[str, Any] = {
                name: list(txn.cursor(table)) for name, table in tables.items()
            }
            names = {store.prefix.encode() + name.encode() for name in tables}
            found["main"] = [(key, value) for key, value in txn.cursor() if key not in names]
        found["places to sleep"] = store.wakeups._map[:]
        return found


def _generally(run: Any, *args: Any, quick: Any = None, **how: Any) -> Any:
    return run(*args, **how)


def put(fields: dict[str, Any]) -> Action:
    return lambda store, new: store.broker.put([job(**{"id": new, **fields})])


def put_beside(fields: dict[str, Any]) -> Action:
    """In a put of two jobs, which is never straight."""
    return lambda store, new: store.broker.put([job(**{"id": new, **fields}), job(id=new + ".1")])


def sleep(which: int, queues: tuple[str, ...], room: int, *, messages: bool) -> Action:
    def act(store: Store, _: str) -> Any:
        taken = store.take(which, room, queues, messages=messages)
        if not taken:
            store.owners[which].doze()
        return taken

    return act


def look(which: int, *, dozes: bool) -> Action:
    """The owner may be marked as asleep, but awake."""

    def act(store: Store, _: str) -> Any:
        taken = store.take(which, 1)
        if dozes:
            store.owners[which].doze()
        return taken

    return act


def give_up(which: int) -> Action:
    return lambda store, _: store.broker.release(store.owners[which].name, {})


def set_queue(name: str, **settings: Any) -> Action:
    return lambda store, _: store.broker.set_queue(name, **settings)


def limit_queue(name: str) -> Action:
    return lambda store, _: store.broker.set_limit(name, LimitSettings(concurrency=1), queue=True)


def cancel_first(store: Store, _: str) -> Any:
    ready = Filter(states=frozenset({State.READY, State.RUNNING}))
    return store.broker.cancel([r.envelope.id for r in store.broker.find(ready, 2).records])


QUEUES = st.sampled_from(["a", "b", "c"])
PLAIN = {
    "rank": st.sampled_from([100, 200]),
    "queue": QUEUES,
    "body": st.binary(max_size=9),
    "retries": st.sampled_from([RetryPolicy(), RetryPolicy(0)]),
}
MORE: dict[str, st.SearchStrategy[Any]] = {
    "task": st.just(""),
    "key": st.sampled_from(["k", "l"]),
    "delay": st.sampled_from([-1.0, 5.0]),
    "at": st.just(9e9),
    "expires": st.just(5.0),
    "result_ttl": st.just(60.0),
    "ttr": st.just(3.0),
    "timeout": st.just(7.0),
    "limit": st.just(JobLimit("l", terms=LimitSettings(concurrency=1))),
    "id": st.sampled_from(["one", "0", "f" * 26]),
}
SPECIAL = st.builds(
    lambda plain, more: {**plain, **more},
    st.fixed_dictionaries(PLAIN),
    st.one_of([st.fixed_dictionaries({name: each}) for name, each in MORE.items()]),
)
SOME_QUEUES = st.sampled_from([(), ("a",), ("b",), ("a", "b")])
SLEEPS = st.builds(sleep, st.integers(0, 2), SOME_QUEUES, st.integers(1, 3), messages=st.booleans())
RARE = st.one_of(
    SPECIAL.map(put),
    SPECIAL.map(put_beside),
    st.builds(give_up, st.integers(0, 2)),
    st.builds(set_queue, QUEUES, paused=st.booleans()),
    st.builds(set_queue, QUEUES, max_size=st.sampled_from([0, 2])),
    QUEUES.map(limit_queue),
    st.just(None),
    st.just(cancel_first),
    st.just(lambda store, _: store.broker.depart("redis://elsewhere")),
    st.just(lambda store, _: store.broker.stay()),
)
ACTIONS = st.integers(0, 9).flatmap(
    lambda n: (
        st.fixed_dictionaries(PLAIN).map(put)
        if n < 5
        else SLEEPS
        if n < 7
        else st.builds(look, st.integers(0, 2), dozes=st.booleans())
        if n < 8
        else RARE
    )
)


def compare(folder: Path, actions: list[Action | None]) -> None:
    """Do the same in a store with straight puts and in a store without; None lets time pass."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as last:
        time = MovedClock(patch, speed=0.0, wall=1.8e9)
        patch.setattr(transfer, "new_id", lambda: "departure")
        straight, general = (Store(folder / n, straight=n == "one") for n in ("one", "other"))
        for store in (straight, general):
            last.callback(store.broker.close)
            # The first put of a store, and of a queue, is never straight.
            store.broker.put([job(id="a", queue="a"), job(id="b", queue="b")])
            store.broker.delete(["a", "b"])
        for action in actions:
            if action is None:
                time.advance(3)
                continue
            new = new_id()
            assert straight.do(action, new) == general.do(action, new)
            assert straight.content() == general.content()


@settings(max_examples=25, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=10, max_size=40))
def test_a_straight_put_writes_the_bytes_of_the_general_put(
    tmp_path_factory: pytest.TempPathFactory, actions: list[Action | None]
) -> None:
    compare(tmp_path_factory.mktemp("stores"), actions)


def put_as(shift: int) -> Action:
    """Put a job whose id seems to be made ``shift`` milliseconds later."""

    def act(store: Store, new: str) -> Any:
        return store.broker.put([job(id=f"{int(new[:11], 16) + shift:011x}{'0' * 15}", queue="a")])

    return act


PUT = put({"queue": "a"})
ASLEEP = [sleep(which, (), 2, messages=False) for which in range(3)]
ALIKE = next(f"q{n}" for n in range(1000) if bloom([f"q{n}"]) == bloom(["a"]))
DOUBTS: dict[str, list[Action | None]] = {
    "a paused queue": [set_queue("a", paused=True), ASLEEP[0], PUT],
    "a full queue": [set_queue("a", max_size=1), PUT, PUT],
    "a queue with a limit": [limit_queue("a"), ASLEEP[0], ASLEEP[1], PUT, PUT],
    "an id out of order": [PUT, put({"queue": "a", "id": "0"}), PUT],
    "an id of the future": [put({"queue": "a", "id": "f" * 26}), PUT],
    "an id that is taken": [put_as(2000), None, put_as(-1000)],
    "a store that moves": [lambda store, _: store.broker.depart("redis://elsewhere"), PUT],
    "an earlier job": [PUT, look(2, dozes=False), ASLEEP[0], ASLEEP[1], give_up(2), PUT],
    "a sleeper of queues that look alike": [
        put({"queue": ALIKE}),
        look(2, dozes=False),
        sleep(0, (ALIKE, "b"), 2, messages=False),
        sleep(1, ("a",), 2, messages=False),
        PUT,
    ],
    "a sleeper that was given up": [ASLEEP[0], give_up(0), ASLEEP[0], PUT],
    "a lease that was cancelled": [ASLEEP[0], PUT, cancel_first, ASLEEP[0]],
    "a lease of a sleeper that was given up": [ASLEEP[0], PUT, give_up(0), ASLEEP[0]],
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_in_doubt_the_general_put_decides(tmp_path: Path, doubt: str) -> None:
    compare(tmp_path, DOUBTS[doubt])


@pytest.mark.parametrize(
    ("sleeps", "expected"),
    [
        (None, State.READY),
        ({}, State.RUNNING),
        ({"queues": ["q"]}, State.RUNNING),
        ({"queues": ["other"]}, State.READY),
        ({"messages": True}, State.READY),
    ],
    ids=str,
)
def test_a_plain_put_goes_straight(
    broker: LmdbBroker,
    monkeypatch: pytest.MonkeyPatch,
    sleeps: dict[str, Any] | None,
    expected: State,
) -> None:
    # given a queue that had a job, and perhaps a sleeper
    broker.put([job(id="before", queue="q")])
    broker.delete(["before"])
    worker = Sleeper(broker)
    if sleeps is not None:
        worker.sleep(**sleeps)
    worker.hinted()
    # when a put cannot use a commit of the general kind
    monkeypatch.setattr(broker, "_transitions", None)
    plain = job(queue="q")
    assert [put.id for put in broker.put([plain])] == [plain.id]
    # then it stored the job all the same
    record = broker.get(plain.id)
    assert record.state is expected
    hints = {State.RUNNING: LEASED + COMMITTED, State.READY: LOOK}[expected]
    is_hinted = sleeps is not None and sleeps != {"queues": ["other"]}
    assert worker.member.sleeper.drain() == (hints if is_hinted else b"")


@pytest.mark.parametrize(
    ("point", "there"), [("store.handed:1", 0), ("store.commit:1", 0), ("store.committed:1", 1)]
)
def test_a_straight_put_is_killed_on_the_way(
    broker: LmdbBroker, url: str, point: str, there: int
) -> None:
    """Laws 1 and 3: wholly or not at all; the sleeper was hinted in either case."""
    broker.put([job(id="before")])
    broker.delete(["before"])
    worker = Sleeper(broker)
    worker.sleep()
    code = """
        broker._transitions = None  # the put goes straight, or fails
        broker.put([Envelope(id=new_id(), task="t")])
    """
    with Process(url, code, TIDEMILL_CRASH=point) as producer:
        assert producer.popen.wait(60) == -signal.SIGKILL
    assert worker.hinted()
    assert len(worker.take()) == there
    if not there:
        worker.sleep()
        broker.put([job(id="one")])
        assert worker.take() == ["one"]


def put_to(worker: Sleeper) -> str:
    """Put a plain job, which is leased to the sleeping worker; return the job's id."""
    worker.broker.put([job(id="before")])
    worker.broker.delete(["before"])
    worker.sleep()
    worker.hinted()
    worker.broker.put([plain := job()])
    record = worker.broker.get(plain.id)
    assert record.state is State.RUNNING
    return plain.id


def test_a_sleeper_takes_its_lease_while_another_writer_has_the_lock(broker: LmdbBroker) -> None:
    worker = Sleeper(broker)
    job_id = put_to(worker)
    assert worker.hinted()
    # when another process writes
    code = """
        def stay(commit):
            say("writes")
            sys.stdin.readline()
        broker._store.commits.run(broker._transitions, stay)
    """
    with Process(broker.url, code) as writer:
        writer.expect("writes")
        # then the worker need not wait
        [lease] = worker.exchange(want=Want(4))
    assert (lease.open().id, lease.attempt, lease.leased > 0) == (job_id, 1, True)
    # and the worker hears of the lease once, and its next step marks the worker as asleep
    worker.sleep(3)
    broker.put([second := job()])
    assert worker.take(3) == [second.id]
    reply = broker.exchange(Step("w", verdicts=[Verdict(lease.token, Outcome.SUCCESS)]))
    assert reply.settled == [True]


def test_a_lease_whose_hints_come_late_is_taken_once(broker: LmdbBroker) -> None:
    worker = Sleeper(broker)
    job_id = put_to(worker)
    assert worker.take() == [job_id]
    assert worker.hinted()
    assert worker.take() == []
    record = broker.get(job_id)
    assert record.state is State.RUNNING


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_that_is_stopped_before_its_sleeper_looks_does_not_start(
    broker: LmdbBroker, how: str
) -> None:
    # law 14
    worker = Sleeper(broker)
    job_id = put_to(worker)
    assert worker.hinted()
    assert getattr(broker, how)([job_id]) == [True]
    assert worker.take() == []
    record = broker.get(job_id)
    assert (record and record.state) is (State.CANCELLED if how == "cancel" else None)


@pytest.mark.parametrize(
    "want", [None, Want(0), Want(2, ("other",)), Want(2, tasks=False, messages=True)]
)
def test_a_sleeper_that_wants_other_jobs_gives_the_lease_back(
    broker: LmdbBroker, want: Want | None
) -> None:
    worker = Sleeper(broker)
    job_id = put_to(worker)
    assert worker.hinted()
    assert worker.exchange(want=want) == []
    record = broker.get(job_id)
    assert (record.state, record.attempt) == (State.READY, 0)


@pytest.mark.parametrize("how", ["attached anew", "given up", "moved"])
def test_hints_for_an_owner_that_no_longer_is_are_no_leases(broker: LmdbBroker, how: str) -> None:
    worker = Sleeper(broker)
    job_id = put_to(worker)
    if how == "attached anew":
        worker = Sleeper(broker)
        worker.hinted()
        assert worker.take() == [job_id]
        return
    assert worker.hinted()
    if how == "given up":
        broker.release("w", {})
    else:
        broker.depart("redis://elsewhere")
    # no job that another owner may have
    reply = broker.exchange(Step("w", want=Want(4)))
    assert [command.verb for command in reply.commands] == (
        ["lost"] if how == "given up" else ["quiet"]
    )
    assert reply.leases == []
