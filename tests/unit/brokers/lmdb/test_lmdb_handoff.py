"""Direct hand-off: a put leases to a worker that sleeps for it; each race it may run into."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest
from lmdb_desk import Gate, Sleeper, commits, in_threads, job, join
from moved_clock import MovedClock
from servers.base import await_stop

from tidemill.brokers.contract.exchange import Mode, Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine import wakeup
from tidemill.core.clock import clock
from tidemill.core.envelope import Envelope, Links, rank_of
from tidemill.core.job import Lease, Outcome, State, Verdict
from tidemill.core.scoreboard import Scoreboard
from tidemill.errors import DuplicateJob

pytestmark = pytest.mark.everyday


@pytest.fixture
def broker(broker: LmdbBroker) -> Iterator[LmdbBroker]:
    yield broker
    recount(broker)


def named(job_id: str, priority: float = 0, **fields: Any) -> Envelope:
    return job(id=job_id, rank=rank_of(priority), **fields)


def state(broker: LmdbBroker, job_id: str) -> State:
    record = broker.get(job_id)
    return record.state


def recount(broker: LmdbBroker) -> None:
    """The counters are those of the records."""
    records = broker.find(Filter(), 10_000).records
    for row in broker.stats():
        for kind in (State.WAITING, State.SCHEDULED, State.READY, State.RUNNING):
            found = [r for r in records if r.envelope.queue == row.name and r.state is kind]
            assert getattr(row, kind.value) == len(found), (row.name, kind)


def in_its_wait(broker: LmdbBroker) -> bool:
    """Whether the first slot says so."""
    return bool(broker._store.wakeups._map[wakeup._SIZE + wakeup._WAITS])


def until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def test_a_put_leases_to_who_sleeps_for_it_and_the_lease_costs_no_commit(
    broker: LmdbBroker,
) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    assert worker.hinted()
    record = broker.get("one")
    assert (record.state, record.worker) == (State.RUNNING, "w")
    before = commits(broker)
    (lease,) = worker.exchange(want=Want(4))
    assert commits(broker) == before
    assert (lease.open().id, lease.attempt, lease.leased > 0) == ("one", 1, True)
    assert worker.take() == []  # it is told of it once
    reply = broker.exchange(Step("w", verdicts=[Verdict(lease.token, Outcome.SUCCESS)]))
    assert reply.settled == [True]
    assert state(broker, "one") is State.SUCCEEDED


def test_the_owner_that_fires_a_schedule_leases_its_job_in_the_same_commit(
    broker: LmdbBroker,
) -> None:
    # law 9: not first the job's commit, and then that of its lease
    worker = Sleeper(broker)
    [made] = broker.change_schedules([Change("s", 0, clock.wall() - 1)])
    reply = broker.exchange(Step("w", want=Want(2), fires=5))
    assert [schedule.name for schedule in reply.schedules] == ["s"]
    broker.change_schedules([Change("s", made.version, clock.wall() + 60, jobs=(named("j"),))])
    assert state(broker, "j") is State.RUNNING
    before = commits(broker)
    assert worker.take(2) == ["j"]
    assert commits(broker) == before


def test_a_real_sleeper_wakes_with_its_lease(broker: LmdbBroker) -> None:
    worker = Sleeper(broker)
    broker.tick()  # or the wait would end at once for it
    assert worker.take() == []
    threads, _ = in_threads([lambda: broker.wait("w", 30)])
    until(lambda: in_its_wait(broker))
    broker.put([named("one")])
    join(threads)
    before = commits(broker)
    assert worker.take() == ["one"]
    assert commits(broker) == before


def test_an_owner_that_is_marked_but_awake_only_gets_a_hint(broker: LmdbBroker) -> None:
    worker = Sleeper(broker)
    assert worker.take() == []
    broker.put([named("one")])
    assert state(broker, "one") is State.READY
    assert worker.hinted()
    assert worker.take() == ["one"]


def test_after_the_first_hand_off_all_waits_for_the_sleeper_to_look(broker: LmdbBroker) -> None:
    """Law 10: what it takes when it looks is in order."""
    worker = Sleeper(broker)
    worker.sleep(2)
    broker.put([named("one")])
    broker.put([named("two")])
    broker.put([named("three", priority=5)])
    assert [state(broker, each) for each in ("one", "two", "three")] == [
        State.RUNNING,
        State.READY,
        State.READY,
    ]
    assert worker.take(2) == ["one", "three"]
    assert worker.take(2) == ["two"]


def test_more_jobs_than_room_by_priority_and_age(broker: LmdbBroker) -> None:
    """Law 10; the rest is ready, for the next sleeper or for who comes."""
    worker, other = Sleeper(broker), Sleeper(broker, "v")
    worker.sleep(2)
    other.sleep(1)
    jobs = [named("a"), named("b", 1), named("c"), named("d", 9), named("e", 1)]
    broker.put(jobs)
    assert worker.take(2) == ["d", "b"]
    assert other.take(1) == ["e"]
    assert [state(broker, each) for each in "ac"] == [State.READY, State.READY]
    assert worker.take(9) == ["a", "c"]


def test_a_large_put_is_left_to_the_sleepers(broker: LmdbBroker) -> None:
    """A producer does not do the work of leasing a thousand jobs."""
    worker = Sleeper(broker)
    worker.sleep(1000)
    broker.put([named(f"{n:04}") for n in range(100)])
    assert worker.hinted()
    assert {r.state for r in broker.find(Filter()).records} == {State.READY}
    assert len(worker.take(1000)) == 100


@pytest.mark.parametrize("mode", list(Mode))
def test_the_modes(broker: LmdbBroker, mode: Mode) -> None:
    """A want of several queues is served as if the sleeper were awake."""
    broker.put([named("first", queue="a"), named("second", queue="b")])
    worker = Sleeper(broker)
    assert len(worker.take(2)) == 2
    worker.sleep(2, ["b", "a"], mode=mode)
    broker.put([named("1", queue="a"), named("2", queue="b"), named("3", 5, queue="a")])
    awake = {Mode.FAIR: ["3", "2"], Mode.STRICT: ["2", "3"], Mode.MERGED: ["3", "1"]}[mode]
    assert worker.take(2, ["b", "a"], mode=mode) == awake


@pytest.mark.parametrize(
    "fields", [{"delay": 60.0}, {"queue": "paused"}, {"queue": "other"}, {"task": ""}], ids=str
)
def test_a_job_that_an_owner_did_not_ask_for_is_not_handed_over(
    broker: LmdbBroker, fields: dict[str, Any]
) -> None:
    broker.put([named("before", queue="q"), named("gone", queue="paused")])
    broker.delete(["before", "gone"])
    broker.set_queue("paused", paused=True)
    worker = Sleeper(broker)
    worker.sleep(4, ["q", "paused"])
    broker.put([named("one", **fields)])
    assert state(broker, "one") in (State.READY, State.SCHEDULED)
    assert worker.take(4, ["q", "paused"]) == []


def test_a_queue_that_looks_alike_from_afar_is_another(broker: LmdbBroker) -> None:
    """Who waits for several is found by a bloom; it is given what it asked for, nothing else."""
    mine = next(f"q{n}" for n in range(1000) if wakeup.bloom([f"q{n}"]) == wakeup.bloom(["other"]))
    for name in (mine, "more"):
        broker.put([named(name, queue=name)])
        broker.delete([name])
    worker = Sleeper(broker)
    worker.sleep(4, [mine, "more"])
    broker.put([named("one", queue="other")])
    assert worker.hinted()
    assert state(broker, "one") is State.READY


def test_a_successor_waits_for_its_key(broker: LmdbBroker) -> None:
    """Law 12."""
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one", key="k")])  # handed over: it runs
    second = named("two", key="k", on_conflict="replace")
    assert broker.put([second])[0].placed == "successor"
    assert worker.take() == ["one"]


@pytest.mark.parametrize("ttr", [-1.0, 0.0, 5.0])
def test_messages_are_never_handed_over(broker: LmdbBroker, ttr: float) -> None:
    """Law 2: a message with ttr=0 is leased only to a consumer that asks for it."""
    broker.put([named("before", queue="q")])
    broker.delete(["before"])
    consumer = Sleeper(broker, "c", "consumer")
    consumer.sleep(1, ["q"], tasks=False, messages=True)
    both = Sleeper(broker, "w")
    both.sleep(1, ["q"], messages=True)
    broker.put([named("m", queue="q", task="", ttr=ttr), named("t", queue="q")])
    assert [state(broker, each) for each in "mt"] == [State.READY, State.READY]
    assert consumer.take(1, ["q"], tasks=False, messages=True) == ["m"]
    assert both.take(1, ["q"], messages=True) == ["t"]


@pytest.mark.parametrize(
    ("want", "kept"),
    [
        (None, []),
        (Want(0), []),
        (Want(2), ["1", "2"]),
        (Want(3, ("other",)), []),
        (Want(3, tasks=False, messages=True), []),
    ],
    ids=str,
)
def test_an_owner_that_wants_less_gives_back_handed_over_jobs(
    broker: LmdbBroker, want: Want | None, kept: list[str]
) -> None:
    """A reply never holds more than is wanted; the rest is as if it had never been leased."""
    worker = Sleeper(broker)
    worker.sleep(3)
    broker.put([named(each) for each in "123"])
    other = Sleeper(broker, "v")
    other.sleep(3)
    assert [lease.open().id for lease in worker.exchange(want=want)] == kept
    back = [each for each in "123" if each not in kept]
    assert other.hinted()
    records = [broker.get(each) for each in back]
    assert [r and (r.state, r.attempt, r.attempts) for r in records] == [
        (State.READY, 0, [])
    ] * len(back)
    assert other.take(3) == back


@pytest.mark.parametrize("how", ["detach", "witness", "no witness"])
def test_an_owner_that_goes_before_it_looked_costs_no_attempt(broker: LmdbBroker, how: str) -> None:
    """Law 6: nothing of it was on a board. Without any witness it is a loss, as ever."""
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    if how == "detach":
        broker.detach("w")
    else:
        assert broker.release("w", {} if how == "witness" else None) == 1
    record = broker.get("one")
    assert (record.state, record.attempt) == (State.READY, 0)
    assert record.losses == (how == "no witness")
    assert Sleeper(broker, "v").take() == ["one"]


def test_nothing_is_handed_to_who_was_given_up(broker: LmdbBroker) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    broker.release("w", {})
    worker.doze()
    broker.put([named("one")])
    assert state(broker, "one") is State.READY
    reply = broker.exchange(Step("w", want=Want(1)))
    assert [c.verb for c in reply.commands] == ["lost"]


def test_cancelled_deleted_or_expired_before_the_sleeper_looked(
    broker: LmdbBroker, moved_clock: MovedClock
) -> None:
    """Law 14: such a job does not start."""
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("c"), named("d"), named("e", expires=5.0), named("f")])
    assert broker.cancel(["c"]) == [True]
    assert broker.delete(["d"]) == [True]
    moved_clock.advance(6)
    assert worker.take() == ["f"]
    [record] = broker.find(Filter(states=frozenset({State.CANCELLED}))).records
    assert (record.envelope.id, record.error) == ("c", "cancelled before it started")
    assert state(broker, "e") is State.EXPIRED
    assert broker.get("d") is None


@pytest.mark.parametrize("how", ["of a flow", "with a successor"])
def test_a_job_expires_while_another_job_is_handed_over(
    broker: LmdbBroker, moved_clock: MovedClock, how: str
) -> None:
    # given: a job that was given back and hinted to one who does not come; another sleeps on
    holder, slow, other = (Sleeper(broker, name) for name in ("holder", "slow", "other"))
    if how == "of a flow":
        behind = named("behind", queue="later", links=Links(waits="any"))
        broker.put([behind, named("old", links=Links(next=("behind",)), expires=60)])
    else:
        broker.put([named("old", key="k", expires=60)])
    [lease] = holder.exchange(want=Want(1))
    if how == "with a successor":
        broker.put([named("behind", key="k", on_conflict="replace", queue="later")])
    slow.sleep(queues=["default"])
    other.sleep(queues=["default"])
    laggard = Sleeper(broker, "later")
    laggard.sleep(queues=["later"])
    holder.exchange(verdicts=[Verdict(lease.token, Outcome.RELEASE)])
    moved_clock.advance(61)
    # when: a put comes upon it
    broker.put([named("new")])
    # then: what waited for it is ready, and whoever sleeps for that is hinted
    assert [state(broker, i) for i in ("old", "new")] == [State.EXPIRED, State.RUNNING]
    assert state(broker, "behind") is State.READY
    assert laggard.hinted()


def test_a_transaction_of_the_callers_own(broker: LmdbBroker) -> None:
    """Law 17: handed over with its commit; an abort loses no wake-up."""
    worker = Sleeper(broker)
    worker.sleep()
    env = broker._store.env
    txn = env.begin(write=True)
    broker.put([named("never")], txn=txn)
    txn.abort()
    assert worker.hinted()
    worker.sleep()  # it looks, finds nothing, and marks itself again
    with env.begin(write=True) as txn:
        broker.put([named("one")], txn=txn)
        assert broker.get("one") is None
    assert state(broker, "one") is State.RUNNING
    assert worker.take() == ["one"]


def test_a_failed_group_is_replayed(broker: LmdbBroker) -> None:
    """The transaction that handed over was dropped: the jobs are there all the same, once."""
    broker.put([named("taken", queue="elsewhere")])
    worker = Sleeper(broker)
    worker.sleep(4, ["default"])
    limiter = Gate(broker._store)
    threads, answers = in_threads(
        [lambda: broker.put([named("one")]), lambda: broker.put([named("taken")])]
    )
    limiter.release_when(2)
    join(threads)
    assert sorted(type(answer).__name__ for answer in answers) == ["DuplicateJob", "list"]
    assert worker.take(4, ["default"]) == ["one"]


@pytest.mark.parametrize("second", [(), ("other",)], ids=["alike", "with another want"])
def test_two_steps_of_a_worker_in_one_commit_have_each_lease_once(
    broker: LmdbBroker, second: tuple[str, ...]
) -> None:
    # given a worker whose two threads make steps that share a commit
    worker = Sleeper(broker)
    broker.put([named("one")])
    limiter = Gate(broker._store)
    threads, answers = in_threads([worker.take])
    until(lambda: len(broker._store.commits.pending) == 1)
    others, more = in_threads([lambda: worker.take(4, second)])
    limiter.release_when(2)
    join(threads + others)
    # then only the first step has the lease, and the second does not give it back
    assert (*answers, *more) == (["one"], [])
    assert state(broker, "one") is State.RUNNING
    assert worker.take() == []


def test_a_reply_that_never_came_is_given_again(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])

    def fail(*_: object) -> None:
        raise lmdb.DiskError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr("tidemill.brokers.lmdb.transitions.Transitions.finish", fail)
        with pytest.raises(Exception, match="no such luck"):
            worker.take()
    assert worker.take() == ["one"]


PRODUCER = """
import sys
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Envelope
open_broker(sys.argv[1]).put([Envelope(id="one", task="t")])
"""


@pytest.mark.parametrize(
    ("point", "there"), [("store.handed:1", 0), ("store.commit:1", 0), ("store.committed:1", 1)]
)
def test_a_producer_killed_on_the_way(broker: LmdbBroker, url: str, point: str, there: int) -> None:
    """Laws 1 and 3: wholly or not at all; the sleeper was hinted in either case."""
    worker = Sleeper(broker)
    worker.sleep()
    dead = subprocess.run(
        [sys.executable, "-c", PRODUCER, url],
        env={**os.environ, "TIDEMILL_CRASH": point},
        timeout=60,
        check=False,
    )
    assert dead.returncode == -signal.SIGKILL
    assert worker.hinted()
    assert worker.take() == ["one"] * there
    if not there:
        worker.sleep()
        broker.put([named("one")])
        assert worker.take() == ["one"]


SLEEPER = """
import sys
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Owner
broker = open_broker(sys.argv[1])
broker.attach(Owner(id="doomed", name="doomed", board=sys.argv[2]))
broker.tick()
broker.exchange(Step("doomed", want=Want(4)))
print("asleep", flush=True)
broker.wait("doomed", 60)
broker.exchange(Step("doomed", want=Want(4)))
print("awake", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["stopped in its wait", "store.begin", "store.fetching"])
def test_a_sleeper_killed_before_it_fetched(
    broker: LmdbBroker, url: str, tmp_path: Path, how: str
) -> None:
    """Laws 3, 5 and 6: the next to look gives the job back, uncounted."""
    Scoreboard(str(tmp_path / "board"), 4).claim("doomed")
    # Attaching and the first exchange pass store.begin some times before.
    crash = {"TIDEMILL_CRASH": f"{how}:1"} if how == "store.fetching" else {}
    sleeper = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, url, str(tmp_path / "board")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **crash},
    )
    try:
        assert sleeper.stdout.readline() == b"asleep\n"
        until(lambda: in_its_wait(broker))
        if how != "store.fetching":
            os.kill(sleeper.pid, signal.SIGSTOP)
            await_stop(sleeper.pid)
        if how == "store.begin":  # it is awake, and waits for the write lock
            with broker._store.env.begin(write=True) as txn:
                broker.put([named("one")], txn=txn)
                os.kill(sleeper.pid, signal.SIGCONT)
                until(lambda: not in_its_wait(broker))
                sleeper.kill()
                sleeper.wait(10)
        else:
            broker.put([named("one")])
            if how == "store.fetching":
                sleeper.wait(30)
    finally:
        sleeper.kill()
        sleeper.wait(10)
        for stream in (sleeper.stdin, sleeper.stdout):
            if stream is not None:
                stream.close()
    assert state(broker, "one") is State.RUNNING
    assert broker.reap() == 1
    record = broker.get("one")
    assert (record.state, record.attempt, record.losses) == (State.READY, 0, 0)


@pytest.mark.parametrize("seed", range(4))
def test_at_random_nothing_is_lost_or_doubled(broker: LmdbBroker, seed: int) -> None:
    """Law 3, with owners that come, sleep, want more or less, and go."""
    rng = random.Random(seed)
    held: dict[str, list[Lease]] = {}
    workers: dict[str, Sleeper] = {}
    accepted: set[str] = set()
    done: list[str] = []
    for n in range(600):
        name = rng.choice(["u", "v", "w"])
        worker = workers.get(name)
        if worker is None:
            workers[name], held[name] = Sleeper(broker, name), []
            continue
        act = rng.choice(["put", "put", "put", "take", "take", "take", "settle", "go", "none"])
        if act == "put":
            new = [
                named(f"{n}-{i}", rng.choice([0, 0, 5]), queue=rng.choice("ab"))
                for i in range(rng.choice([1, 1, 1, 3]))
            ]
            broker.put(new)
            accepted |= {each.id for each in new}
        elif act == "take":
            want = Want(rng.randrange(4), rng.choice([(), ("a",), ("b", "a")]))
            leases = worker.exchange(want=want)
            assert len(leases) <= want.count
            held[name] += leases
            worker.doze()
        elif act == "settle" and held[name]:
            lease = held[name].pop()
            outcome = rng.choice([Outcome.SUCCESS, Outcome.RELEASE])
            reply = broker.exchange(Step(name, verdicts=[Verdict(lease.token, outcome)]))
            assert reply.settled == [True]
            assert reply.leases == []
            done += [lease.open().id] if outcome is Outcome.SUCCESS else []
        elif act == "go" and rng.random() < 0.3:
            broker.detach(name)
            del workers[name]
        elif act == "none":
            assert worker.exchange() == []
        if n % 50 == 0:
            recount(broker)
    for name in workers:
        broker.detach(name)
    last = Sleeper(broker, "last")
    left = last.take(10_000)
    assert sorted([*left, *done]) == sorted(accepted)
    recount(broker)


def test_a_taken_id_hands_over_nothing(broker: LmdbBroker) -> None:
    worker = Sleeper(broker)
    worker.sleep()
    broker.put([named("one")])
    assert worker.take() == ["one"]
    worker.sleep()
    with pytest.raises(DuplicateJob):
        broker.put([named("two"), named("one")])
    assert worker.take() == []
    assert broker.get("two") is None
