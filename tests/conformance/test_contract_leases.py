"""Leasing and settling: fences, attempts, ttr, modes, followers, notes."""

from __future__ import annotations

import pytest
from broker_driver import LiveOwner, check_counts, ids_of, job, message, state
from kinds import Clock

from tidemill.brokers.contract.broker import KEEP_ATTEMPTS, Broker
from tidemill.brokers.contract.exchange import Mode, Step
from tidemill.brokers.contract.features import Feature
from tidemill.core.job import Outcome, State, Verdict
from tidemill.core.retry import RetryPolicy
from tidemill.errors import TidemillError


def test_a_finished_job_keeps_its_result_and_its_trail(broker: Broker, worker: LiveOwner) -> None:
    # law 3, case T3
    given = job()
    broker.put([given])
    [lease] = worker.take()
    running = broker.get(given.id)
    assert (running.state, running.worker) == (State.RUNNING, "w1")
    assert running.leased > 0
    assert (running.token, running.lease_ends) == (lease.token, 0.0)
    # when
    assert worker.settle(lease, result=b"r", started=10.0, ended=11.0)
    # then
    record = broker.get(given.id)
    assert (record.state, record.raw_result, record.error, record.worker) == (
        State.SUCCEEDED,
        b"r",
        "",
        "",
    )
    [attempt] = record.attempts
    assert (attempt.number, attempt.worker, attempt.outcome) == (1, "w1", Outcome.SUCCESS)
    assert (attempt.started, attempt.ended) == (10.0, 11.0)
    assert record.finished > 0
    assert record.token == 0
    assert running.attempts == []  # an old record does not change behind one's back


@pytest.mark.parametrize("outcome", sorted(Outcome))
def test_every_outcome_leads_to_its_state(
    broker: Broker, worker: LiveOwner, outcome: Outcome
) -> None:
    # law 3: the drawing in job.py
    given = job()
    broker.put([given])
    [lease] = worker.take()
    assert worker.settle(lease, outcome, error="why", delay=50.0)
    expected = {
        Outcome.SUCCESS: (State.SUCCEEDED, 1, ""),
        Outcome.RETRY: (State.SCHEDULED, 1, ""),
        Outcome.FAIL: (State.FAILED, 1, "why"),
        Outcome.RELEASE: (State.SCHEDULED, 0, ""),
        Outcome.SNOOZE: (State.SCHEDULED, 0, ""),
        Outcome.CANCELLED: (State.CANCELLED, 1, "why"),
        Outcome.EXPIRED: (State.EXPIRED, 1, "why"),
    }[outcome]
    record = broker.get(given.id)
    assert (record.state, record.attempt, record.error if record.state.finished else "") == expected


def test_a_held_retry_is_counted_at_once_and_runs_later(broker: Broker, worker: LiveOwner) -> None:
    # law 8: nobody runs the job before the second verdict
    given = job(key="k")
    broker.put([given])
    [lease] = worker.take()
    assert worker.settle(lease, Outcome.RETRY, error="stuck", delay=50.0, hold=True)
    # then: written down, and still leased
    record = broker.get(given.id)
    assert (record.state, record.attempt, record.worker) == (State.RUNNING, 1, "w1")
    assert [attempt.error for attempt in record.attempts] == ["stuck"]
    assert broker.retry([given.id]) == [False]
    assert worker.take() == []
    # when
    assert worker.settle(lease, Outcome.RELEASE)
    # then
    assert not worker.settle(lease, Outcome.RELEASE)
    [again] = worker.take()
    assert again.attempt == 2


def test_a_final_verdict_is_not_held(broker: Broker, worker: LiveOwner) -> None:
    # law 8
    last, cancelled, third = job(retries=0), job(), job()
    broker.put([last, cancelled, third])
    leases = worker.take(3)
    broker.cancel([cancelled.id])
    for lease in leases[:2]:
        assert worker.settle(lease, Outcome.RETRY, hold=True)
        assert not worker.settle(lease, Outcome.RELEASE)
    assert state(broker, last.id) is State.FAILED
    assert state(broker, cancelled.id) is State.CANCELLED
    # and one that is held ends when it is cancelled meanwhile
    assert worker.settle(leases[2], Outcome.RETRY, hold=True)
    broker.cancel([third.id])
    assert worker.settle(leases[2], Outcome.RELEASE)
    assert state(broker, third.id) is State.CANCELLED


@pytest.mark.parametrize("later", list(Outcome))
def test_a_late_verdict_is_refused_and_changes_nothing(
    broker: Broker, worker: LiveOwner, later: Outcome
) -> None:
    # law 4, case S4
    given = job()
    broker.put([given])
    [lease] = worker.take()
    assert worker.settle(lease, Outcome.RELEASE)
    [again] = worker.take()
    assert again.token != lease.token
    before = broker.get(given.id)
    # when
    assert not worker.settle(lease, later, result=b"late", error="late", delay=9)
    assert not worker.touch(lease)
    worker.note(lease, line="late", done=1.0)
    # then
    assert broker.get(given.id) == before
    assert worker.settle(again, result=b"right")
    assert not worker.settle(again)
    assert not worker.settle(999_999)
    assert broker.get(given.id).raw_result == b"right"


def test_a_lease_is_its_owners_alone(broker: Broker, worker: LiveOwner) -> None:
    # law 4
    broker.put([job()])
    [lease] = worker.take()
    other = LiveOwner(broker, "w2")
    assert not other.settle(lease)
    assert not other.touch(lease)
    assert worker.settle(lease)


def test_a_step_answers_each_part_in_order(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job(), job()])
    one, two = worker.take(2)
    verdicts = [Verdict(one.token, 0), Verdict(77, 0), Verdict(one.token, 0), Verdict(two.token, 0)]
    assert worker.exchange(verdicts=verdicts).settled == [True, False, False, True]


@pytest.mark.needs("a retry keeps its place")
def test_a_retried_job_keeps_its_place_in_the_order(broker: Broker, worker: LiveOwner) -> None:
    # law 10
    first, second, third = job(), job(), job()
    broker.put([first, second, third])
    one, two = worker.take(2)
    worker.settle(two, Outcome.RETRY)
    worker.settle(one, Outcome.RELEASE)
    assert worker.take_ids() == ids_of([first, second, third])


def test_attempts_are_counted_up_to_the_limit(broker: Broker, worker: LiveOwner) -> None:
    # law 7, case T3: retries=2 means exactly 3 runs
    given = job(retries=2)
    broker.put([given])
    for number in (1, 2, 3):
        [lease] = worker.take()
        assert lease.attempt == number
        worker.settle(lease, Outcome.RETRY, error=f"no {number}", traceback="at line 1")
    record = broker.get(given.id)
    assert (record.state, record.attempt, record.error) == (State.FAILED, 3, "no 3")
    assert [a.error for a in record.attempts] == ["no 1", "no 2", "no 3"]
    assert {a.traceback for a in record.attempts} == {"at line 1"}
    [row] = broker.stats()
    assert (row.retried, row.failed, row.accepted) == (2, 1, 1)


def test_a_retry_of_the_last_attempt_is_shown_as_a_failure(
    broker: Broker, worker: LiveOwner
) -> None:
    for retries, expected in ((0, ["fail"]), (1, ["retry", "fail"])):
        given = job(retries=retries)
        broker.put([given])
        for _ in expected:
            [lease] = worker.take()
            worker.settle(lease, Outcome.RETRY, error="why")
        record = broker.get(given.id)
        assert [attempt["outcome"] for attempt in record.public()["attempts"]] == expected


def test_release_and_snooze_count_no_attempt(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # law 6
    given = job(retries=0)
    broker.put([given])
    for outcome, delay in (
        (Outcome.RELEASE, 0.0),
        (Outcome.SNOOZE, 5.0),
        (Outcome.RELEASE, 5.0),
    ) * 2:
        [lease] = worker.take()
        assert lease.attempt == 1
        worker.settle(lease, outcome, delay=delay)
        clock.advance(delay)
    assert broker.get(given.id).attempts == []


def test_a_trail_shows_the_latest_attempts(broker: Broker, worker: LiveOwner) -> None:
    given = job(retries=100)
    broker.put([given])
    for _ in range(KEEP_ATTEMPTS + 5):
        worker.settle(worker.take()[0], Outcome.RETRY)
    record = broker.get(given.id)
    assert record.attempt == KEEP_ATTEMPTS + 5
    numbers = [a.number for a in record.attempts]
    assert numbers == list(range(6, KEEP_ATTEMPTS + 6))


@pytest.mark.needs(Feature.INSPECT)
def test_without_an_ack_a_message_comes_back_after_its_ttr(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    # case Q16, case S3
    given = message(ttr=100)
    broker.put([given])
    [lease] = consumer.take()
    assert (lease.attempt, lease.deadline) == (1, 100.0)
    assert broker.stats()[0].size == 1
    held = broker.get(given.id)
    assert held.lease_ends == pytest.approx(held.leased + 100, abs=1)
    other = LiveOwner(broker, "c2", "consumer")
    clock.advance(90)
    assert other.take() == []
    clock.advance(11)
    [again] = other.take()
    assert (again.open().id, again.attempt) == (given.id, 2)
    # then the first holder's ack is too late, and the second's job untouched
    assert not consumer.settle(lease)
    assert state(broker, given.id) is State.RUNNING
    assert other.settle(again)
    clock.advance(1000)
    assert consumer.take() == []


def test_an_ack_after_the_ttr_is_late_even_before_any_check(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    # case Q16, law 4: what has come due moves first
    broker.put([message(ttr=10)])
    [lease] = consumer.take()
    clock.advance(10.1)
    assert not consumer.settle(lease)
    assert consumer.take()[0].attempt == 2


def test_touch_starts_the_ttr_anew(broker: Broker, consumer: LiveOwner, clock: Clock) -> None:
    # case Q16
    broker.put([message(ttr=100)])
    [lease] = consumer.take()
    for _ in range(3):
        clock.advance(90)
        assert consumer.touch(lease)
    assert consumer.touch(lease, 500)
    clock.advance(490)
    assert consumer.touch(lease, 1)
    clock.advance(1.1)
    assert not consumer.touch(lease)
    assert not consumer.settle(lease)


def test_a_task_with_a_worker_has_no_ttr(broker: Broker, worker: LiveOwner, clock: Clock) -> None:
    # law 5: slow is not dead
    broker.put([job()])
    [lease] = worker.take()
    assert lease.deadline == 0
    clock.advance(86_400)
    broker.tick()
    assert worker.touch(lease)
    assert worker.settle(lease)


def test_a_message_can_have_a_limit_of_attempts(
    broker: Broker, consumer: LiveOwner, clock: Clock
) -> None:
    given = message(ttr=1, retries=RetryPolicy(1, delay=0))
    broker.put([given])
    for _ in range(2):
        consumer.take()
        clock.advance(1.1)
    broker.tick()
    record = broker.get(given.id)
    assert (record.state, record.error) == (State.FAILED, "ttr passed without an ack")


def test_strict_empties_the_first_queue_first(broker: Broker, worker: LiveOwner) -> None:
    # case Q15, law 10
    jobs = {name: [job(name), job(name, priority=9)] for name in ("B", "A", "C")}
    for pair in jobs.values():
        broker.put(pair)
    expected = [jobs[name][n].id for name in "ABC" for n in (1, 0)]
    assert [worker.take_ids(1, ["A", "B", "C"])[0] for _ in range(3)] == expected[:3]
    assert worker.take_ids(9, ["A", "B", "C"]) == expected[3:]


def test_merged_is_one_order_across_queues(broker: Broker, worker: LiveOwner) -> None:
    # law 10
    jobs = [job("BACA"[n % 4], priority=n % 3) for n in range(24)]
    broker.put(jobs)
    order = sorted(range(24), key=lambda n: (-(n % 3), n))
    first = worker.take_ids(5, ["A", "B", "C"], Mode.MERGED)
    rest = worker.take_ids(99, [], Mode.MERGED)
    assert first + rest == [jobs[n].id for n in order]


@pytest.mark.needs("exact turns")
@pytest.mark.parametrize("named", [True, False])
def test_fair_gives_every_queue_its_turn(broker: Broker, worker: LiveOwner, named: bool) -> None:
    # law 10: taking one at a time starves nobody, whatever else happens in between
    names = ["a", "b", "c"]
    for name in names:
        broker.put([job(name) for _ in range(20)])
    queues = names if named else []
    served = []
    for _ in range(12):
        [lease] = worker.take(1, queues, Mode.FAIR)
        served.append(lease.open().queue)
        worker.settle(lease)
        broker.put([job("d")]) if named else None
    assert {name: served.count(name) for name in names} == dict.fromkeys(names, 4)
    hand = [lease.open().queue for lease in worker.take(9, queues, Mode.FAIR)]
    assert {name: hand.count(name) for name in names} == dict.fromkeys(names, 3)


def test_fair_fills_a_want_from_the_fuller_queues(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job("a"), *(job("b") for _ in range(50))])
    assert len(worker.take(40, ["a", "b", "none"], Mode.FAIR)) == 40


def test_a_hand_is_full_while_there_are_jobs(broker: Broker, worker: LiveOwner) -> None:
    # law 10; a store reads in pages: hands of many sizes, over their borders
    jobs = [job(body=b"x" * (n % 50)) for n in range(1500)]
    broker.put(jobs)
    taken: list[str] = []
    for size in (1, 7, 64, 300, 1, 127, 500):
        hand = worker.take_ids(size)
        assert len(hand) == size
        taken += hand
    taken += worker.take_ids(2000)
    assert taken == ids_of(jobs)


def test_tasks_and_messages_are_told_apart(
    broker: Broker, worker: LiveOwner, consumer: LiveOwner
) -> None:
    task, raw = job(), message()
    broker.put([raw, task])
    assert worker.take_ids() == [task.id]
    assert consumer.take_ids() == [raw.id]


@pytest.mark.needs("one order of tasks and messages")
@pytest.mark.parametrize("mode", list(Mode))
def test_tasks_and_messages_come_in_one_order(
    broker: Broker, worker: LiveOwner, mode: Mode
) -> None:
    # law 10
    jobs = [job() if n % 2 else message() for n in range(6)]
    broker.put(jobs)
    assert worker.take_ids(3, mode=mode, kinds="both") == ids_of(jobs[:3])
    assert worker.take_ids(9, mode=mode, kinds="both") == ids_of(jobs[3:])


def test_followers_are_stored_with_the_verdict(broker: Broker, worker: LiveOwner) -> None:
    # law 3
    first, second, third = job(), job("other"), job(delay=5)
    broker.put([first])
    [lease] = worker.take()
    assert worker.settle(lease, followers=(second, third))
    assert state(broker, second.id) is State.READY
    assert state(broker, third.id) is State.SCHEDULED
    # and a late verdict brings none
    assert not worker.settle(lease, followers=(job(id="late"),))
    assert broker.get("late") is None


def test_followers_never_keep_a_job_from_being_settled(broker: Broker, worker: LiveOwner) -> None:
    # law 16: finishing always works
    broker.set_queue("full", max_size=1)
    kept = job("full", id="taken", key="k")
    broker.put([kept, job()])
    [lease] = worker.take(1, ["default"])
    followers = (
        job("full", id="over"),
        job(id="taken", body=b"other"),
        job(id="rejected", key="k", on_conflict="reject"),
        job(id="last"),
    )
    assert worker.settle(lease, followers=followers)
    assert state(broker, "over") is State.READY
    assert state(broker, "last") is State.READY
    assert broker.get("taken").envelope == kept
    assert broker.get("rejected") is None


def test_a_follower_may_have_the_key_of_the_job_it_follows(
    broker: Broker, worker: LiveOwner
) -> None:
    broker.put([job(key="k")])
    [lease] = worker.take()
    worker.settle(lease, followers=(job(id="next", key="k", on_conflict="reject"),))
    assert state(broker, "next") is State.READY


def test_progress_and_log_are_shown_while_it_runs_and_after(
    broker: Broker, worker: LiveOwner
) -> None:
    given = job()
    broker.put([given])
    [lease] = worker.take()
    worker.note(lease, done=1.0, total=4.0)
    worker.note(lease, line="half way", time=5.0)
    worker.exchange(notes=[], verdicts=[Verdict(lease.token, Outcome.RETRY)])
    [again] = worker.take()
    for n in range(150):
        worker.note(again, line=str(n), time=float(n))
    worker.settle(again)
    record = broker.get(given.id)
    assert str(record.progress) == "(1, 4)"  # whole numbers
    assert record.log == [(float(n), str(n)) for n in range(50, 150)]
    assert broker.delete([given.id]) == [True]


def test_each_report_of_progress_replaces_the_text_of_the_one_before(
    broker: Broker, worker: LiveOwner
) -> None:
    # given a running job with a line of log
    given = job()
    broker.put([given])
    [lease] = worker.take()
    worker.note(lease, line="begun", time=5.0)

    def shown() -> tuple[tuple[int, int] | None, str]:
        record = broker.get(given.id)
        return record.progress, record.progress_text

    # when it reports progress with a text
    worker.note(lease, done=1.0, total=4.0, text="resizing é.png")
    # then the text is shown; a line of log leaves it there
    assert shown() == ((1, 4), "resizing é.png")
    worker.note(lease, line="half way", time=6.0)
    assert shown() == ((1, 4), "resizing é.png")
    # and a report with a log line has both
    worker.note(lease, done=2.0, total=4.0, text="packing", line="packed", time=7.0)
    assert shown() == ((2, 4), "packing")
    # and a report without a text has none; the log is as it was
    worker.note(lease, done=3.0, total=4.0)
    assert shown() == ((3, 4), "")
    worker.note(lease, done=4.0, total=4.0, text="done")
    worker.settle(lease)
    assert shown() == ((4, 4), "done")
    record = broker.get(given.id)
    assert [line for _, line in record.log] == ["begun", "half way", "packed"]


def test_a_detached_owner_cannot_exchange(broker: Broker) -> None:
    with pytest.raises(TidemillError, match="'nobody' is not attached"):
        broker.exchange(Step("nobody"))
    with pytest.raises(TidemillError, match="'nobody' is not attached"):
        broker.wait("nobody", 0)
    check_counts(broker)


@pytest.mark.needs(Feature.INSPECT)
def test_a_lease_whose_ttr_has_passed_is_closed_once_when_its_owner_leaves(
    broker: Broker, clock: Clock
) -> None:
    # given a message whose ttr has passed, and nobody has looked since
    consumer = LiveOwner(broker, "c", "consumer")
    broker.put([message(ttr=10)])
    consumer.take()
    clock.advance(11)
    # when
    broker.detach(consumer.id)
    # then
    [row] = broker.stats()
    assert (row.running, row.ready + row.scheduled) == (0, 1)
    check_counts(broker)
