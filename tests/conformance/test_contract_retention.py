"""Retention, search, waits and wake-ups."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from broker_driver import LiveOwner, everything, ids_of, job, message, state
from kinds import Clock, Kind

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import JobLimit, LimitSettings
from tidemill.core.job import Outcome, Record, State
from tidemill.errors import InvalidOption


def finish(
    broker: Broker, hand: LiveOwner, count: int, result: bytes = b"", **fields: object
) -> list[str]:
    jobs = [job(**fields) for _ in range(count)]
    broker.put(jobs)
    for lease in hand.take(count):
        hand.settle(lease, result=result)
    return ids_of(jobs)


def kept(broker: Broker) -> set[str]:
    return {r.envelope.id for r in everything(broker)}


@pytest.fixture
def small(clock: Clock, open_store: Callable[..., Broker]) -> Broker:
    return open_store(keep=100, keep_count=3, keep_failed=1000)


@pytest.mark.needs(Feature.RESULTS)
def test_finished_jobs_are_kept_by_time(small: Broker, clock: Clock) -> None:
    # law 15
    hand = LiveOwner(small)
    [done] = finish(small, hand, 1)
    [failed] = finish(small, hand, 1, result=b"")
    small.put([job(id="bad", retries=0)])
    hand.settle(hand.take()[0], Outcome.RETRY)
    clock.advance(90)
    small.tick()
    assert kept(small) == {done, failed, "bad"}
    clock.advance(11)
    small.tick()
    assert kept(small) == {"bad"}
    clock.advance(900)
    small.tick()
    assert kept(small) == set()
    assert small.stats()[0].succeeded == 2  # totals stay


@pytest.mark.needs(Feature.RESULTS)
def test_succeeded_jobs_are_kept_by_number(small: Broker, clock: Clock) -> None:
    # law 15: pruning is part of the work
    hand = LiveOwner(small)
    ids = finish(small, hand, 10)
    hand.exchange()
    small.tick()
    assert kept(small) == set(ids[-3:])


@pytest.mark.needs(Feature.RESULTS)
def test_cancelled_and_expired_jobs_are_kept_by_number_too(small: Broker, clock: Clock) -> None:
    # law 15: debouncing cancels a job each time
    for n in range(10):
        small.put([job(id=f"k{n}", key="same", on_conflict="replace")])
    small.put([job(id="late", expires=1)])
    clock.advance(2)
    small.tick()
    assert len(kept(small)) == 11  # young: somebody may still ask
    clock.advance(61)
    small.tick()
    assert kept(small) == {"k9", "k7", "k8", "late"}  # one waits, three are kept


@pytest.mark.needs(Feature.RESULTS)
def test_a_young_result_is_never_pruned(small: Broker, clock: Clock) -> None:
    # law 15
    hand = LiveOwner(small)
    results = finish(small, hand, 5, result=b"r")
    clock.advance(30)
    plain = finish(small, hand, 3)
    small.tick()
    assert kept(small) == set(results)  # those without a result go first
    clock.advance(20)
    small.tick()
    assert kept(small) == set(results)
    clock.advance(11)
    small.tick()
    assert kept(small) == set(results[-3:])
    assert not kept(small) & set(plain)


@pytest.mark.needs(Feature.RESULTS)
def test_a_young_result_outlives_a_short_keep(
    clock: Clock, open_store: Callable[..., Broker]
) -> None:
    # law 15
    broker = open_store(keep=0, keep_count=0)
    hand = LiveOwner(broker)
    [with_result] = finish(broker, hand, 1, result=b"r")
    [without] = finish(broker, hand, 1)
    clock.advance(1)
    broker.tick()
    assert kept(broker) == {with_result}
    assert broker.was_here(without)
    clock.advance(60)
    broker.tick()
    assert kept(broker) == set()


def test_a_job_says_itself_how_long_its_result_is_kept(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    [short] = finish(broker, worker, 1, result=b"r", result_ttl=5.0)
    [long] = finish(broker, worker, 1, result=b"r", result_ttl=90_000.0)
    clock.advance(6)
    broker.tick()
    assert kept(broker) == {long}
    assert short not in kept(broker)
    clock.advance(80_000)
    broker.tick()
    assert kept(broker) == {long}


@pytest.mark.needs(Feature.RESULTS)
@pytest.mark.parametrize("ttl", [5.0, 90.0, 900.0])
def test_results_with_a_time_of_their_own_do_not_keep_others_beyond_the_number(
    small: Broker, clock: Clock, ttl: float
) -> None:
    # case M13, law 15
    # given old results, and young results that are kept for a shorter or a longer time
    hand = LiveOwner(small)
    old = finish(small, hand, 4, result=b"r")
    old_of_their_own = finish(small, hand, 4, result=b"r", result_ttl=900.0)
    clock.advance(70)
    young = finish(small, hand, 2, result=b"r")
    of_their_own = finish(small, hand, 150, result=b"r", result_ttl=ttl)
    # when a worker goes on
    for _ in range(5):
        finish(small, hand, 1)
    small.tick()
    # then the old results go, since there are too many, and the young results stay
    assert not kept(small) & {*old, *old_of_their_own}
    assert {*young, *of_their_own} <= kept(small)


@pytest.mark.needs(Feature.RESULTS)
def test_an_unfinished_job_is_never_pruned(small: Broker, clock: Clock) -> None:
    hand = LiveOwner(small)
    jobs = [job(retries=0), job(delay=10_000), job()]
    small.put(jobs)
    hand.settle(hand.take()[0], Outcome.FAIL)
    small.retry([jobs[0].id])
    clock.advance(5000)
    small.tick()
    assert kept(small) == set(ids_of(jobs))


@pytest.mark.needs(Feature.INSPECT)
def test_a_pruned_own_id_is_told_from_an_unknown_one(broker: Broker, worker: LiveOwner) -> None:
    # law 15
    assert broker.was_here(new_id())
    assert not broker.was_here("17")
    assert not broker.was_here("0" * 26)  # made in 1970


@pytest.mark.parametrize("options", ["keep=-1", "keep_count=x", "keep_failed=nan", "keep=inf"])
def test_bad_options_of_retention_are_named(kind: Kind, tmp_path: Path, options: str) -> None:
    # case Q17
    with pytest.raises(InvalidOption, match=options.split("=")[0]):
        open_broker(kind.store_url(tmp_path, options))


def test_find_shows_each_once_newest_first_on_every_page_size(
    broker: Broker, worker: LiveOwner
) -> None:
    jobs = [job() for _ in range(12)]
    broker.put(jobs)
    newest_first = ids_of(reversed(jobs))
    for limit in (1, 3, 4, 5, 12, 13, 100):
        found = [r.envelope.id for r in everything(broker, limit=limit)]
        assert found == newest_first, limit


def test_find_shows_the_newest_first_whatever_the_ids(broker: Broker) -> None:
    # given ids of the user's own among ours
    jobs = [job(id=own) if own else job() for own in ("zebra", "", "17", "apple", "", "Z", "0")]
    broker.put(jobs)
    newest_first = ids_of(reversed(jobs))
    ready = Filter(states=frozenset({State.READY}))
    for limit in (1, 3, 100):
        for what in (Filter(), ready):
            found = [r.envelope.id for r in everything(broker, what, limit)]
            assert found == newest_first, (what, limit)


def test_find_goes_on_where_it_was_although_jobs_come_and_go(broker: Broker) -> None:
    jobs = [job() for _ in range(9)]
    broker.put(jobs)
    page = broker.find(Filter(), 3)
    assert [r.envelope.id for r in page.records] == ids_of(jobs[:-4:-1])
    broker.delete([jobs[6].id, jobs[5].id])  # the border, and the next
    broker.put([job()])
    rest = [r.envelope.id for r in broker.find(Filter(), 100, page.cursor).records]
    assert rest == ids_of(jobs[4::-1])


@pytest.mark.parametrize("cursor", ["nix", "-1", "1.5", "id:" + "x" * 600, "n:x", "\0", "9" * 30])
def test_a_cursor_that_no_list_ended_with_is_refused(broker: Broker, cursor: str) -> None:
    broker.put([job() for _ in range(2)])
    with pytest.raises(InvalidOption, match=r"^cursor .* leave it out"):
        broker.find(Filter(), 1, cursor)


def test_find_filters_by_everything(broker: Broker, worker: LiveOwner) -> None:
    one = job("a", task="app.one", key="k", tags=("red", "big"), text="Hello World")
    two = job("b", task="app.two", tags=("red",), text="bye")
    broker.put([one, two])
    worker.take(1, ["b"])

    def found(**what: object) -> list[str]:
        return [r.envelope.id for r in everything(broker, Filter(**what))]

    assert found(queue="a") == found(task="app.one") == found(key="k") == [one.id]
    assert found(tag="big") == found(text="hello") == [one.id]
    assert found(states=frozenset({State.RUNNING})) == [two.id]
    assert found(states=frozenset({State.READY})) == [one.id]
    assert found(tag="red") == [two.id, one.id]
    assert found(tag="red", queue="a", states=frozenset({State.RUNNING})) == []


@pytest.mark.needs(Feature.INSPECT)
def test_a_list_reads_no_results_bodies_and_logs(
    broker: Broker, worker: LiveOwner
) -> None:  # case M10
    # given jobs whose every large part is larger than all lists may be
    large = 900_000
    fields = {"task": "app.work", "tags": ("t",), "headers": {"h": "1"}, "text": "x"}
    jobs = [job(body=b"b" * large, queue="q" * n, **fields) for n in (1, 40, 200)]
    broker.put([*jobs, job("small", body=b"small", text="x")])
    leases = worker.take(3, ["q", "q" * 40])
    for lease in leases:
        worker.note(lease, line="l" * 1000, time=5.0, done=1, total=2, text="half")
    worker.settle(leases[0], result=b"r" * large)

    def lists() -> list[list[Record]]:
        pages = [broker.find(what) for what in (Filter(), Filter(text="x", look=10))]
        return [page.records for page in pages]

    lists()
    tracemalloc.start()
    try:
        found = lists()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    for records in found:
        assert [r.envelope.id for r in reversed(records)][:3] == ids_of(jobs)
        for record in records:
            whole = broker.get(record.envelope.id)
            assert record == whole.for_list()
            assert record.listed
            assert (record.raw_result, record.log, record.envelope.body) == (b"", [], b"")
        assert [record.progress_text for record in records] == ["", "", "half", "half"]
    assert peak < large


def test_find_by_the_beginning_of_an_id(broker: Broker) -> None:
    ids = ["a", "ab", "ab1", "ab2", "ab\uffff", "ac", "zz"]
    broker.put([job(id=i) for i in ids])
    for prefix in ("a", "ab", "ab1", "b", "zz", "zzz"):
        for limit in (1, 2, 100):
            found = everything(broker, Filter(id_prefix=prefix), limit)
            expected = {i for i in ids if i.startswith(prefix)}
            assert {r.envelope.id for r in found} == expected, (prefix, limit)
            assert len(found) == len(expected)
    assert everything(broker, Filter(id_prefix="a", queue="other")) == []


@pytest.mark.needs(Feature.INSPECT)
def test_find_by_the_ending_of_an_id(
    broker: Broker, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a search that looks at 10 jobs a page
    for name in ("contract.inspection", "postgres.inspect"):
        monkeypatch.setattr(f"tidemill.brokers.{name}.LOOK_MOST", 10)
    monkeypatch.setattr("tidemill.brokers.redis.inspect._SCAN_IDS", 5)
    monkeypatch.setattr("tidemill.brokers.lmdb.look.inspect._SCAN", 5)
    ids = [f"{n}-{'even' if n % 2 == 0 else 'odd'}" for n in range(40)] + ["ü-é", "é"]
    broker.put([job(id=i) for i in ids])
    # then all pages together have every job
    for suffix in ("even", "3-odd", "é", "0-even", "none", "-odd"):
        for limit in (1, 3, 100):
            found = everything(broker, Filter(id_suffix=suffix), limit)
            expected = [i for i in ids[::-1] if i.endswith(suffix)]
            assert [r.envelope.id for r in found] == expected, (suffix, limit)
    both = everything(broker, Filter(id_prefix="3", id_suffix="-odd"))
    assert [r.envelope.id for r in both] == [
        "39-odd",
        "37-odd",
        "35-odd",
        "33-odd",
        "31-odd",
        "3-odd",
    ]
    # and one page does not look at all jobs
    if kind.name in ("lmdb", "redis", "postgresql"):
        page = broker.find(Filter(id_suffix="0-even"), 7)
        assert len(page.records) <= 1
        assert page.cursor


@pytest.mark.needs(Feature.INSPECT)
def test_a_page_ends_after_the_number_of_jobs_to_look_at(
    broker: Broker, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given stores that look at jobs in small pieces
    monkeypatch.setattr("tidemill.brokers.redis.inspect._SCAN", 5)
    for name in ("lmdb.look", "postgres"):
        monkeypatch.setattr(f"tidemill.brokers.{name}.inspect._SCAN", 5)
    broker.put([job(id=f"{n}", tags=("rare",) if n in (0, 39) else ()) for n in range(40)])
    rare = Filter(tag="rare", look=10)
    # then all pages together have every job
    assert [r.envelope.id for r in everything(broker, rare, 1)] == ["39", "0"]
    assert [r.envelope.id for r in everything(broker, rare)] == ["39", "0"]
    # and one page does not look at all jobs
    if kind.name in ("lmdb", "redis", "postgresql"):
        page = broker.find(rare, 2)
        assert [r.envelope.id for r in page.records] == ["39"]
        assert page.cursor


@pytest.mark.needs(Feature.INSPECT)
def test_oldest_is_the_ready_job_accepted_first(broker: Broker, worker: LiveOwner) -> None:
    # whatever its priority; what runs or is not due does not count
    broker.put([job("q", created=4.0, priority=9), job("q", created=5.0, delay=999)])
    worker.take(1, ["q"])
    broker.put([job("q", created=7.0, priority=-5), job("q", created=6.0, priority=5)])
    broker.put([message("q", created=8.0), job("other", created=3.0)])
    assert {row.name: row.oldest for row in broker.stats()} == {"q": 7.0, "other": 3.0}
    delete_waiting(broker, "q")
    assert {row.name: row.oldest for row in broker.stats()}["q"] == 0.0


@pytest.mark.needs(Feature.INSPECT, Feature.LIMITS)
def test_oldest_counts_the_jobs_that_wait_for_a_limit(  # case M17
    broker: Broker, worker: LiveOwner
) -> None:
    one = LimitSettings(concurrency=1)
    limits = {key: JobLimit("api", key, 1.0, one) for key in "ab"}
    broker.put([job("q", created=4.0, limit=limits[key]) for key in "ab"])
    worker.take(2, ["q"])
    broker.put([job("q", created=5.0, limit=limits["a"], priority=-5)])
    broker.put([job("q", created=6.0, limit=limits[key], priority=5) for key in "ba"])
    broker.put([job("q", created=7.0)])
    assert [row.oldest for row in broker.stats()] == [5.0]


def test_records_are_plain_data_for_programs(broker: Broker, worker: LiveOwner) -> None:
    [done] = finish(broker, worker, 1, priority=7, text="what it is")
    public = broker.get(done).public()
    assert (public["id"], public["state"], public["priority"]) == (done, "succeeded", 7)
    assert public["summary"] == "what it is"
    assert [a["outcome"] for a in public["attempts"]] == ["success"]


def test_unknown_ids_are_none(broker: Broker) -> None:
    assert broker.get("unknown") is None
    assert broker.get("") is None
    assert broker.get("x" * 1000) is None
    assert broker.wait_for(["unknown"], 30) == [None]


def test_wait_for_returns_when_all_have_finished(broker: Broker, worker: LiveOwner) -> None:
    # case T16
    jobs = [job(), job()]
    broker.put(jobs)
    one, two = worker.take(2)
    worker.settle(one)
    [first, second] = broker.wait_for(ids_of(jobs), 0.05)
    assert (first.state, second.state) == (State.SUCCEEDED, State.RUNNING)
    answers: list[State] = []
    thread = threading.Thread(
        target=lambda: answers.extend(r.state for r in broker.wait_for(ids_of(jobs), 30))
    )
    thread.start()
    worker.settle(two, Outcome.FAIL)
    thread.join(30)
    assert answers == [State.SUCCEEDED, State.FAILED]


def test_wait_for_the_first_returns_when_one_has_finished(
    broker: Broker, worker: LiveOwner
) -> None:
    jobs = [job() for _ in range(3)]
    broker.put(jobs)
    one, two, three = worker.take(3)
    running = [r.state for r in broker.wait_for(ids_of(jobs), 0.05, first=True)]
    assert running == [State.RUNNING] * 3
    for lease, ended in ((two, 1), (one, 0), (three, 2)):
        left = [i for i in ids_of(jobs) if not state(broker, i).finished]
        answers: list[State] = []

        def wait(left: list[str] = left, answers: list[State] = answers) -> None:
            answers.extend(r.state for r in broker.wait_for(left, 30, first=True))

        thread = threading.Thread(target=wait)
        thread.start()
        worker.settle(lease)
        thread.join(30)
        assert answers.count(State.SUCCEEDED) == 1
        assert answers[left.index(jobs[ended].id)] is State.SUCCEEDED


def test_wait_for_the_first_counts_missing_and_finished_jobs(broker: Broker) -> None:
    waiting = job()
    broker.put([waiting])
    gone, here = broker.wait_for(["unknown", waiting.id], 30, first=True)
    assert (gone, here.state) == (None, State.READY)
    assert broker.wait_for([], 30, first=True) == []
    broker.cancel([waiting.id])
    [record] = broker.wait_for([waiting.id], 30, first=True)
    assert record.state is State.CANCELLED


@pytest.mark.needs(Feature.RESULTS)
@pytest.mark.parametrize("act", ["cancel", "delete"])
def test_wait_for_ends_when_the_job_does_otherwise(broker: Broker, act: str) -> None:
    given = job()
    broker.put([given])
    threading.Timer(0.05, lambda: getattr(broker, act)([given.id])).start()
    [record] = broker.wait_for([given.id], 30)
    assert (record.state if record else None) is (State.CANCELLED if act == "cancel" else None)


@pytest.mark.moving_clock
@pytest.mark.needs(Feature.RESULTS)
def test_wait_for_sees_an_expiry_with_no_worker_there(broker: Broker) -> None:
    # case T14
    given = job(expires=0.1)
    broker.put([given])
    [record] = broker.wait_for([given.id], 30)
    assert record.state is State.EXPIRED


def sleeping(broker: Broker, hand: LiveOwner, *queues: str) -> Callable[[], float]:
    """Have an owner sleep in wait; returns what waits for its waking, and tells how long."""
    done: list[float] = []
    ready = threading.Event()

    want = Want(1, queues, tasks=hand.kind == "worker", messages=hand.kind == "consumer")

    def sleep() -> None:
        reply = hand.exchange(want=want)
        while not reply.leases:
            ready.set()
            broker.wait(hand.id, min(20, reply.next_due))
            reply = hand.exchange(want=want)
        done.append(time.monotonic())

    broker.tick()  # so that none is due for a while
    broker.wait(hand.id, 0)  # takes what was left to wake for
    thread = threading.Thread(target=sleep)
    thread.start()
    assert ready.wait(30)
    start = time.monotonic()

    def woken() -> float:
        thread.join(30)
        return done[0] - start

    return woken


@pytest.mark.moving_clock
@pytest.mark.parametrize(
    "event",
    [
        *("put", "due", "settle", "detach"),
        pytest.param("retry", marks=pytest.mark.needs(Feature.INSPECT)),
        pytest.param("resume", marks=pytest.mark.needs(Feature.PAUSE)),
        pytest.param("release", marks=pytest.mark.needs("a witness")),
        pytest.param("promote", marks=pytest.mark.needs(Feature.KEYS)),
    ],
)
def test_a_sleeping_owner_is_woken_for_jobs_it_can_take(broker: Broker, event: str) -> None:
    # law 9, case Q2; everything but a put is done by another owner that is then busy elsewhere
    hand, other = LiveOwner(broker), LiveOwner(broker, "w2")
    given = job(key="k" if event == "promote" else "", id="a")
    lease = None
    if event in ("settle", "release", "detach", "promote", "due"):
        broker.put([given])
        [lease] = other.take()
    if event == "promote":
        broker.put([job(key="k", id="b", on_conflict="replace")])
    if event == "retry":
        broker.put([job(id="a", delay=1000)])
    if event == "resume":
        broker.set_queue("default", paused=True)
        broker.put([given])
    woken = sleeping(broker, hand)
    happen: dict[str, Callable[[], object]] = {
        "put": lambda: broker.put([given]),
        "due": lambda: other.settle(lease, Outcome.RETRY, delay=0.2),  # and does not come back
        "settle": lambda: other.settle(lease, Outcome.RELEASE),
        "promote": lambda: other.settle(lease),
        "retry": lambda: broker.retry(["a"]),
        "resume": lambda: broker.set_queue("default", paused=False),
        "release": lambda: broker.release(other.id, {}),
        "detach": lambda: broker.detach(other.id),
    }
    happen[event]()
    assert woken() < 15


@pytest.mark.moving_clock
def test_a_sleeping_owner_is_woken_when_a_ttr_ends(broker: Broker) -> None:
    # case Q16, case S3: the time it sleeps to is brought forward by somebody else
    busy, idle = LiveOwner(broker, "c1", "consumer"), LiveOwner(broker, "c2", "consumer")
    broker.put([message(ttr=1000)])
    [lease] = busy.take()
    woken = sleeping(broker, idle)
    assert busy.touch(lease, 0.3)  # and does not come back
    assert woken() < 15


def test_wait_sleeps_and_burns_no_time(broker: Broker) -> None:
    # case Q3
    worker = LiveOwner(broker)
    for _ in range(5):  # who is new is told to look, over a network a moment later
        worker.take()
        start, cpu = time.monotonic(), time.process_time()
        worker.broker.wait(worker.id, 0.2)
        if time.monotonic() - start > 0.19:
            break
    assert 0.19 < time.monotonic() - start < 10
    assert time.process_time() - cpu < 0.1


def test_wait_returns_readable_descriptors_and_for_wake(broker: Broker, worker: LiveOwner) -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"x")
        assert broker.wait(worker.id, 30, [read]) == [read]
    finally:
        os.close(read)
        os.close(write)
    threading.Timer(0.05, broker.wake, [worker.id]).start()
    start = time.monotonic()
    broker.wait(worker.id, 30)
    broker.wait(worker.id, 0)
    assert time.monotonic() - start < 15
    broker.wake("nobody")


def test_a_backup_can_be_opened(
    broker: Broker, need: Callable[[Feature], None], kind: Kind, tmp_path: Path
) -> None:
    need(Feature.BACKUP)
    jobs = [job(), job(delay=100)]
    broker.put(jobs)
    target = f"{tmp_path}/backup/store"
    broker.backup(target)
    with pytest.raises(InvalidOption, match="already"):
        broker.backup(target)
    copy = open_broker(kind.store_url(tmp_path / "backup"))
    try:
        assert {r.envelope.id for r in everything(copy)} == set(ids_of(jobs))
        assert LiveOwner(copy).take_ids() == [jobs[0].id]
        assert state(broker, jobs[0].id) is State.READY
    finally:
        copy.close()


def test_info_says_which_broker_it_is(broker: Broker, kind: Kind) -> None:
    info = broker.info()
    name = "django" if kind.name.startswith("django") else kind.name
    assert (info["broker"], info["url"], info.get("jobs", 0)) == (name, broker.url, 0)
    assert (info.get("made", 0) > 0) is (Feature.INSPECT in broker.features)
    assert info["durable"] is (Feature.DURABLE in broker.features and not kind.volatile)
