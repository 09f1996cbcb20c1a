"""Jobs that wait for others: counted down, given their results, and never left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from broker_driver import LiveOwner, everything, job, message, state
from kinds import Clock, Kind

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.core.envelope import Envelope, Links
from tidemill.core.job import Outcome, State, Verdict
from tidemill.errors import DuplicateJob, InvalidOption, JobNotFound

READY, WAITING, SCHEDULED = State.READY, State.WAITING, State.SCHEDULED
SUCCEEDED, FAILED, CANCELLED = State.SUCCEEDED, State.FAILED, State.CANCELLED


@pytest.fixture(autouse=True)
def needs_flows(need: Callable[[Feature], None]) -> None:
    need(Feature.FLOWS)


def before(*names: str, **fields: Any) -> Envelope:
    """A job with others behind it."""
    inputs = tuple(fields.pop("inputs", ()))
    links = Links(next=names, waits=fields.pop("waits", ""), inputs=inputs)
    return job(links=links, **fields)


def behind(waits: str = "success", **fields: Any) -> Envelope:
    """A job behind others."""
    return before(*fields.pop("next", ()), waits=waits, **fields)


def run(hand: LiveOwner, outcome: Outcome = Outcome.SUCCESS, **fields: Any) -> str:
    """Lease the next job and settle it; its id."""
    [lease] = hand.take()
    assert hand.settle(lease, outcome, **fields)
    return lease.open().id


def states(broker: Broker, *ids: str) -> list[State]:
    return [state(broker, job_id) for job_id in ids]


def test_a_chain_runs_one_after_the_other(broker: Broker, worker: LiveOwner) -> None:
    # case C1
    broker.put([behind(id="c"), behind(id="b", next=["c"]), before("b", id="a")])
    assert states(broker, "a", "b", "c") == [READY, WAITING, WAITING]
    assert [broker.get(i).pending for i in "abc"] == [0, 1, 1]
    assert [run(worker), run(worker), run(worker)] == ["a", "b", "c"]
    assert worker.take() == []


def test_a_job_begins_in_the_step_that_ends_the_last_before_it(
    broker: Broker, worker: LiveOwner
) -> None:
    # law 3, case C4
    broker.put([behind(id="d"), before("d", id="b"), before("d", id="c")])
    one, two = worker.take(2)
    assert worker.settle(one)
    assert state(broker, "d") is WAITING
    reply = worker.exchange(verdicts=[Verdict(two.token, Outcome.SUCCESS)], want=Want(1))
    assert [lease.open().id for lease in reply.leases] == ["d"]


def test_a_lease_brings_the_ends_of_earlier_jobs(broker: Broker, worker: LiveOwner) -> None:
    # cases C1, C2
    broker.put(
        [
            behind("any", id="z", inputs=["b", "a", "gone"]),
            before("z", id="a"),
            before("z", id="b", retries=0),
        ]
    )
    run(worker, result=b"one")
    run(worker, Outcome.RETRY, error="why")
    [lease] = worker.take()
    found = [(i.id, i.state, i.result, i.error) for i in lease.inputs]
    assert found == [
        ("b", "failed", b"", "why"),
        ("a", "succeeded", b"one", ""),
        ("gone", "", b"", ""),
    ]
    # and again after it was given back
    assert worker.settle(lease, Outcome.RELEASE)
    [again] = worker.take()
    assert again.inputs == lease.inputs


@pytest.mark.parametrize("how", ["fail", "cancel", "delete", "expire", "purge"])
def test_a_job_that_cannot_succeed_is_cancelled_at_once(
    broker: Broker, worker: LiveOwner, clock: Clock, how: str
) -> None:
    # case C1: later steps are cancelled
    expires = 0.2 if how == "expire" else 0.0
    broker.put(
        [
            behind(id="d"),
            behind(id="c", next=["d"]),
            before("c", id="a", expires=expires, queue="q"),
            before("c", id="b"),
        ]
    )
    # when
    if how == "fail":
        [lease] = worker.take(1, ["q"])
        assert worker.settle(lease, Outcome.FAIL, error="no")
    elif how == "cancel":
        assert broker.cancel(["a"]) == [True]
    elif how == "delete":
        assert broker.delete(["a"]) == [True]
    elif how == "purge":
        assert delete_waiting(broker, "q") == 1
    else:
        clock.advance(0.3)
        broker.tick()
    # then
    assert states(broker, "b", "c", "d") == [READY, CANCELLED, CANCELLED]
    words = {"fail": "a failed", "delete": "a was deleted", "expire": "a expired"}
    assert words.get(how, "a was cancelled") in broker.get("c").error
    assert "c was cancelled" in broker.get("d").error
    assert run(worker) == "b"
    assert state(broker, "c") is CANCELLED


def test_a_long_chain_falls_without_ado(
    kind: Kind, clock: Clock, open_store: Callable[..., Broker]
) -> None:
    # one call ends 3,000 jobs, also on a busy machine; memory:// waits for nobody
    broker = open_store(**({} if kind.name == "memory" else {"patience": 60}))
    worker = LiveOwner(broker)
    count = 3000
    links = [behind(id=f"j{n:05}", next=[f"j{n + 1:05}"]) for n in range(1, count - 1)]
    broker.put([behind(id=f"j{count - 1:05}"), *reversed(links), before("j00001", id="j00000")])
    run(worker, Outcome.FAIL)
    broker.tick()  # a server that others wait for does it in pieces
    assert broker.stats()[0].waiting == 0
    assert state(broker, f"j{count - 1:05}") is CANCELLED
    assert broker.retry(["j00000"]) == [True]
    assert broker.stats()[0].waiting == count - 1


@pytest.mark.parametrize("fails", [False, True])
def test_callbacks_run_for_their_own_ends(broker: Broker, worker: LiveOwner, fails: bool) -> None:
    # cases C2, C5
    broker.put(
        [
            behind("success", id="good"),
            behind("failure", id="bad"),
            behind("any", id="both"),
            before("good", "bad", "both", id="a"),
        ]
    )
    run(worker, Outcome.FAIL if fails else Outcome.SUCCESS)
    fired = {worker.take()[0].open().id for _ in range(2)}
    assert fired == {"both", "bad" if fails else "good"}
    assert worker.take() == []
    if fails:
        assert state(broker, "good") is CANCELLED
    else:
        assert broker.get("bad") is None  # it was not needed


@pytest.mark.parametrize("fails", [False, True])
def test_a_barrier_ends_by_itself_when_all_have(
    broker: Broker, worker: LiveOwner, fails: bool
) -> None:
    # case C2
    broker.put(
        [
            behind("success", id="then"),
            behind("failure", id="oh"),
            behind("barrier", id="all", next=["then", "oh"]),
            *[before("all", id=f"m{n}") for n in range(5)],
        ]
    )
    for n in range(5):
        assert state(broker, "all") is WAITING
        assert broker.get("all").pending == 5 - n
        run(worker, Outcome.FAIL if fails and n == 2 else Outcome.SUCCESS)
    record = broker.get("all")
    assert record.state is (FAILED if fails else SUCCEEDED)
    if fails:
        assert "1 of its jobs did not succeed" in record.error
    assert [run(worker)] == ["oh" if fails else "then"]
    assert worker.take() == []


def test_members_may_come_in_many_puts(broker: Broker, worker: LiveOwner) -> None:
    # a group larger than one holds in memory
    broker.put([behind("barrier", id="all")], hold=["all"])
    broker.put([before("all", id="a")])
    run(worker)
    assert states(broker, "a", "all") == [SUCCEEDED, WAITING]
    broker.put([before("all", id="b")], let_go=["all"])
    assert state(broker, "all") is WAITING
    run(worker)
    assert state(broker, "all") is SUCCEEDED
    with pytest.raises(JobNotFound, match="all"):
        broker.put([before("all", id="c")])
    with pytest.raises(JobNotFound, match="all"):
        broker.put([], let_go=["all"])
    assert broker.get("c") is None


def test_a_barrier_without_members_ends_at_once(broker: Broker) -> None:
    broker.put([behind("barrier", id="none"), behind("success", id="free")])
    assert states(broker, "none", "free") == [SUCCEEDED, READY]


def test_bad_links_store_nothing(broker: Broker) -> None:
    broker.put([job(id="plain", key="held")])
    for jobs in (
        [before("nobody", id="a")],
        [before("plain", id="a")],
        [before("late", id="a"), behind(id="late")],
    ):
        with pytest.raises(JobNotFound):
            broker.put([job(id="other"), *jobs])
    with pytest.raises(InvalidOption, match="key"):
        broker.put([behind(id="a", key="k")])
    with pytest.raises(InvalidOption, match="key"):  # also if it would not be stored
        broker.put([behind(id="a"), before("a", id="b", key="held")])
    broker.put([behind(id="w", next=[])], hold=["w"])
    with pytest.raises(DuplicateJob):
        broker.put([before("w", id="a"), before("w", id="plain")])
    assert broker.get("w").pending == 1
    assert {r.envelope.id for r in everything(broker)} == {"plain", "w"}


def test_retrying_a_failed_step_gives_the_chain_another_chance(
    broker: Broker, worker: LiveOwner
) -> None:
    broker.put(
        [
            behind(id="last"),
            behind("any", id="hook"),
            behind("barrier", id="all", next=["last", "hook"]),
            before("all", id="m1"),
            before("all", id="m2"),
        ]
    )
    run(worker, Outcome.FAIL)
    run(worker)
    assert run(worker) == "hook"
    assert states(broker, "all", "last") == [FAILED, CANCELLED]
    # when
    assert broker.retry(["m1"]) == [True]
    # then
    assert states(broker, "all", "last", "hook") == [WAITING, WAITING, SUCCEEDED]
    assert run(worker) == "m1"
    assert states(broker, "all", "last") == [SUCCEEDED, READY]
    assert run(worker) == "last"
    assert worker.take() == []  # the hook has fired before: once


def test_a_job_cancelled_by_hand_is_not_revived(broker: Broker, worker: LiveOwner) -> None:
    broker.put([behind(id="b"), before("b", id="a")])
    assert broker.cancel(["b"]) == [True]
    run(worker, Outcome.FAIL)
    broker.retry(["a"])
    assert state(broker, "b") is CANCELLED
    # but it may wait again
    assert broker.retry(["b"]) == [True]
    assert state(broker, "b") is WAITING


def test_a_retried_job_waits_for_the_jobs_before_it(broker: Broker, worker: LiveOwner) -> None:
    # case M2
    broker.put([behind(id="c"), behind(id="b", next=["c"], delay=50.0), before("b", id="a")])
    [lease] = worker.take()
    assert broker.cancel(["a", "b", "c"]) == [True, True, False]
    assert worker.settle(lease, Outcome.CANCELLED)
    # when
    assert broker.retry(["a", "b", "c"]) == [True, True, False]
    # then
    assert states(broker, "a", "b", "c") == [READY, WAITING, WAITING]
    assert run(worker) == "a"
    assert broker.retry(["b"]) == [True]  # its delay has begun
    assert [run(worker), run(worker)] == ["b", "c"]
    assert worker.take() == []


def test_a_job_is_not_retried_while_a_job_before_it_lacks_success(
    broker: Broker, worker: LiveOwner
) -> None:
    # case M2
    broker.put([behind(id="b"), behind("any", id="hook", retries=0), before("b", "hook", id="a")])
    run(worker, Outcome.FAIL)
    run(worker, Outcome.FAIL)
    assert states(broker, "a", "b", "hook") == [FAILED, CANCELLED, FAILED]
    assert broker.retry(["b"]) == [False]
    assert state(broker, "b") is CANCELLED
    assert broker.retry(["hook"]) == [True]
    assert run(worker) == "hook"


@pytest.mark.parametrize("ended", [False, True])
def test_a_barrier_cancelled_by_hand_waits_again(
    broker: Broker, worker: LiveOwner, ended: bool
) -> None:
    # case M2
    barrier = behind("barrier", id="all", next=["then"])
    broker.put([behind(id="then"), barrier, before("all", id="m1"), before("all", id="m2")])
    run(worker)
    assert broker.cancel(["all"]) == [True]
    assert states(broker, "all", "then") == [CANCELLED, CANCELLED]
    if ended:
        run(worker)
    # when
    assert broker.retry(["all"]) == [True]
    # then
    if not ended:
        assert states(broker, "all", "then") == [WAITING, WAITING]
        assert run(worker) == "m2"
    assert states(broker, "all", "then") == [SUCCEEDED, READY]


def test_the_delay_of_a_step_runs_from_when_it_may_begin(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker.put([behind(id="b", delay=10.0), before("b", id="a")])
    clock.advance(20.0)
    run(worker)
    assert state(broker, "b") is SCHEDULED
    clock.advance(10.1)
    assert worker.take_ids() == ["b"]


def test_retries_and_deaths_of_those_before_do_not_count(broker: Broker, worker: LiveOwner) -> None:
    # case C4
    broker.put([behind(id="b"), before("b", id="a", retries=3)])
    run(worker, Outcome.RETRY)
    [lease] = worker.take()
    broker.release(worker.id, {lease.token: "killed"})
    other = LiveOwner(broker, "w2")
    [lease] = other.take()
    broker.release(other.id, None)
    assert broker.get("b").pending == 1
    third = LiveOwner(broker, "w3")
    run(third)
    assert third.take_ids() == ["b"]


def test_results_are_kept_as_long_as_a_flow_needs_them(
    open_store: Callable[..., Broker], clock: Clock
) -> None:
    # law 15
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker = open_store(keep=5, keep_count=1)
    worker = LiveOwner(broker)
    broker.put([behind(id="z", inputs=["a"]), before("z", id="a"), before("z", id="b", delay=500)])
    run(worker, result=b"x")
    broker.put([job(id="other")])
    run(worker, result=b"y")
    for _ in range(5):
        clock.advance(80.0)
        broker.tick()
    assert broker.get("other") is None
    assert state(broker, "a") is SUCCEEDED
    clock.advance(120.0)
    assert run(worker) == "b"
    [lease] = worker.take()
    assert lease.inputs[0].result == b"x"
    worker.settle(lease)
    clock.advance(80.0)
    broker.tick()
    assert broker.get("a") is None


def test_results_of_a_group_are_kept_for_its_dependents(
    open_store: Callable[..., Broker], clock: Clock
) -> None:
    # law 15
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker = open_store(keep=5, keep_count=1)
    worker = LiveOwner(broker)
    outer = [behind(id="z", delay=200.0), behind("barrier", id="all", next=["z"])]
    broker.put([*outer, behind("barrier", id="in", next=["all"]), before("in", id="a")])
    assert run(worker, result=b"x") == "a"
    for _ in range(2):
        clock.advance(80.0)
        broker.tick()
    assert states(broker, "a", "in", "all") == [SUCCEEDED] * 3
    clock.advance(50.0)
    assert run(worker) == "z"
    for _ in range(3):
        clock.advance(80.0)
        broker.tick()
    assert [broker.get(job_id) for job_id in ("a", "in", "all")] == [None] * 3


def test_a_short_result_ttl_holds_before_a_hook_that_falls(
    open_store: Callable[..., Broker], clock: Clock
) -> None:
    # law 15
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker = open_store(keep=500)
    worker = LiveOwner(broker)
    broker.put([behind("failure", id="hook"), before("hook", id="a", result_ttl=5.0)])
    broker.put([behind(id="next"), before("next", id="b", result_ttl=5.0)])
    run(worker, result=b"x")
    run(worker, result=b"x")
    clock.advance(6.0)
    broker.tick()
    assert broker.get("a") is None  # nobody needs it any more
    assert state(broker, "b") is SUCCEEDED
    assert run(worker) == "next"
    clock.advance(61.0)
    broker.tick()
    assert broker.get("b") is None


def test_a_group_outlives_a_short_time_of_keeping_of_the_store(
    open_store: Callable[..., Broker], clock: Clock
) -> None:
    # law 15; its caller still reads it
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker = open_store(keep=0, keep_failed=0)
    worker = LiveOwner(broker)
    broker.put([behind("barrier", id="all"), before("all", id="a"), before("all", id="b")])
    run(worker)
    run(worker, Outcome.FAIL)
    clock.advance(50.0)
    broker.tick()
    assert states(broker, "a", "b", "all") == [SUCCEEDED, FAILED, FAILED]
    clock.advance(11.0)
    broker.tick()
    assert [broker.get(job_id) for job_id in ("a", "b", "all")] == [None] * 3


def test_a_barrier_is_never_run(broker: Broker, worker: LiveOwner) -> None:
    broker.put([behind("barrier", id="all"), before("all", id="a")])
    run(worker, Outcome.FAIL)
    assert broker.retry(["all"]) == [False]
    assert worker.take() == []
    assert state(broker, "all") is FAILED


def test_followers_of_a_verdict_may_be_a_flow(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job(id="a")])
    [lease] = worker.take()
    followers = (behind(id="c"), before("c", "nobody", id="b"))
    assert worker.settle(lease, followers=followers)
    assert [run(worker), run(worker)] == ["b", "c"]


def test_messages_may_come_before_a_task(
    broker: Broker, worker: LiveOwner, consumer: LiveOwner
) -> None:
    waits = behind(id="t")
    broker.put([waits, message(id="m", links=Links(next=("t",)))])
    [lease] = consumer.take()
    assert consumer.settle(lease)
    assert worker.take_ids() == ["t"]


def test_a_job_that_waits_again_still_expires(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # given a job with an expiry that was dropped, since the job before it failed
    if not clock.fake:
        pytest.skip("needs a clock that can be moved")
    broker.put([behind(id="c", expires=60.0), before("c", id="a")])
    [lease] = worker.take(1)
    assert worker.settle(lease, Outcome.FAIL, error="no")
    assert states(broker, "a", "c") == [FAILED, CANCELLED]
    # when the job before it is tried again, and the time is over
    assert broker.retry(["a"]) == [True]
    assert states(broker, "a", "c") == [READY, State.WAITING]
    clock.advance(61.0)
    broker.tick()
    # then it has expired
    assert state(broker, "c") is State.EXPIRED
