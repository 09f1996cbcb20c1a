"""Chains, groups and flows on every broker: retry, what hooks get, and the records of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_driver import LiveOwner, check_counts
from kinds import Kind

from tidemill import Ended, Flow, InvalidOption, JobFailed, State, Tidemill, chain, group
from tidemill.brokers.contract.features import Feature
from tidemill.client.compositions import delete_jobs, retry_jobs
from tidemill.core.codec import pack, sign_result
from tidemill.core.job import Outcome
from tidemill.errors import RetryRefused
from tidemill.testing import run_all

SUCCEEDED, FAILED, CANCELLED = State.SUCCEEDED, State.FAILED, State.CANCELLED


class Tasks:
    """An app whose task ``fail`` fails until somebody mends it."""

    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self.ran: list[str] = []
        self.told: list[Ended] = []
        self.is_broken = True

        @mill.task(name="ok")
        def ok(before: Any = None, name: str = "ok") -> str:
            self.ran.append(name)
            return name

        @mill.task(name="fail", retries=0)
        def fail(before: Any = None, name: str = "fail") -> str:
            self.ran.append(name)
            if self.is_broken:
                raise ValueError(name)
            return name

        @mill.task(name="hook", retries=0)
        def hook(ended: Ended) -> None:
            self.told.append(ended)

        self.ok, self.fail, self.hook = ok, fail, hook

    def shapes(self) -> dict[str, Any]:
        """Compositions in which ``fail`` stops the job ``then``."""
        then, ok, fail = self.ok.call(name="then"), self.ok.call(None, "ok"), self.fail.call(None)
        flow = Flow()
        flow.add(then, after=[flow.add(ok), flow.add(chain(fail, self.ok.call(name="in")))])
        return {
            "chain": chain(ok, self.fail, then),
            "chain of chains": chain(chain(fail, self.ok.call(name="in")), then),
            "chain at the end": chain(ok, chain(self.fail, then)),
            "group of chains": group([ok, chain(fail, then)]),
            "group of groups": chain(group([ok, group([fail, ok])]), then),
            "last step of a member": chain(group([ok, chain(ok, self.fail)]), then),
            "member after a step": chain(ok, group([self.fail, self.ok]), then),
            "flow": flow,
        }

    def lefts(self) -> list[tuple[str, str]]:
        """The ids and states of all jobs that did not succeed."""
        records = (job.record for job in self.mill.jobs())
        return [(r.envelope.id, str(r.state)) for r in records if r.state is not SUCCEEDED]


@pytest.fixture
def tasks(kind: Kind, tmp_path: Path, need: Callable[[Feature], None]) -> Iterator[Tasks]:
    need(Feature.FLOWS)
    with Tidemill(kind.store_url(tmp_path)) as mill:
        yield Tasks(mill)
        check_counts(mill.broker)


def hands(tasks: Tasks) -> LiveOwner:
    return LiveOwner(tasks.mill.broker)


# -- retry ---------------------------------------------------------------------------------------


def test_a_retry_runs_what_failed_and_then_what_was_cancelled_by_it(tasks: Tasks) -> None:
    # case M2
    for name, shape in tasks.shapes().items():
        tasks.is_broken = True
        handle = tasks.mill.enqueue(shape)
        run_all(tasks.mill)
        assert tasks.ran.count("fail") == 1, name
        assert "then" not in tasks.ran, name
        # when
        tasks.is_broken = False
        tasks.ran.clear()
        assert handle.retry() == 1, name
        run_all(tasks.mill)
        # then
        assert tasks.ran[0] == "fail", name
        assert tasks.ran.count("fail") == 1, name
        assert tasks.lefts() == [], name
        tasks.ran.clear()


def test_a_chain_cancelled_while_a_step_ran_runs_on_from_that_step(tasks: Tasks) -> None:
    # case M2
    owner = hands(tasks)
    steps = [tasks.ok.call(name=name) for name in "abcd"]
    handle = tasks.mill.enqueue(chain(*steps))
    [lease] = owner.take()
    assert handle.cancel(terminate=True)
    # when it still runs
    with pytest.raises(RetryRefused, match=f"job {handle.steps[0].id} was asked to stop"):
        handle.retry()
    # then
    assert owner.settle(lease, Outcome.CANCELLED)
    assert handle.retry()
    run_all(tasks.mill)
    assert tasks.ran == list("abcd")
    assert tasks.lefts() == []


def test_a_cancelled_chain_of_groups_keeps_its_order(tasks: Tasks) -> None:
    # case M2
    owner = hands(tasks)
    a, b, c, d, e = (tasks.ok.call(name=name) for name in "abcde")
    inner = chain(tasks.ok.call(None, "x"), group([a, b]), c)
    handle = tasks.mill.enqueue(chain(group([tasks.ok.call(None, "y"), inner]), d, e))
    leases = owner.take(2)
    assert handle.cancel()
    for lease in leases:
        assert owner.settle(lease, Outcome.CANCELLED)
    # when
    assert handle.retry()
    # then each job waits for the jobs before it
    leases = owner.take(9)
    firsts = (f"{handle.id}.0000.0000000", f"{handle.id}.0000.0000001.0000")
    assert sorted(lease.open().id for lease in leases) == [*firsts]
    for lease in leases:
        assert owner.settle(lease, Outcome.RELEASE)
    run_all(tasks.mill)
    assert sorted(tasks.ran) == [*"abcdexy"]
    place = tasks.ran.index
    assert place("x") < min(map(place, "ab")) < max(map(place, "ab")) < place("c")
    assert max(place("c"), place("y")) < place("d") < place("e")
    assert tasks.lefts() == []


def test_a_retry_that_cannot_succeed_is_refused_and_names_the_job(tasks: Tasks) -> None:
    # case M2
    mill = tasks.mill
    handle = mill.enqueue(chain(tasks.fail.call(), group([tasks.ok, tasks.ok]), tasks.ok, tasks.ok))
    run_all(mill)
    failed, pair, middle = handle.steps[:3]
    for stopped in (pair, middle, mill.job(pair.id), mill.job(f"{pair.id}.0000000")):
        with pytest.raises(RetryRefused, match=f"job {failed.id}, which failed: ValueError: fail"):
            stopped.retry()
    assert retry_jobs(mill.runtime, [pair.id, middle.id]) == [False, False]
    tasks.is_broken = False
    assert retry_jobs(mill.runtime, [handle.id]) == [True]
    run_all(mill)
    assert tasks.lefts() == []


def test_a_group_that_lacks_members_is_not_retried(tasks: Tasks) -> None:
    # case M2
    def members() -> Iterator[Any]:
        yield from [tasks.ok.call()] * 2500
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        tasks.mill.enqueue(group(members()).using(id="part"))
    with pytest.raises(RetryRefused, match="group part lacks members"):
        tasks.mill.group("part").retry()
    assert tasks.mill.job("part").state is CANCELLED


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["step", "group", "chain"])
def test_a_hook_of_a_chain_cancelled_in_the_middle_waits_for_its_end(
    tasks: Tasks, first: str
) -> None:
    # case M3
    owner, ok = hands(tasks), tasks.ok
    begin: Any = {"step": ok.call(), "group": group([ok.call()]), "chain": chain(ok.call(), ok)}
    hooked = chain(begin[first], ok, ok).on_complete(tasks.hook).on_failure(tasks.hook)
    handle = tasks.mill.enqueue(hooked.on_success(tasks.hook))
    [lease] = owner.take()
    # when
    assert handle.cancel()
    # then no hook fires before the end
    assert owner.take(9) == []
    assert owner.settle(lease, Outcome.CANCELLED, error="it stopped")
    run_all(tasks.mill)
    assert [(ended.id, ended.state) for ended in tasks.told] == [(handle.id, CANCELLED)] * 2
    # and the hook for a success fires after a retry
    assert handle.retry()
    run_all(tasks.mill)
    assert [ended.state for ended in tasks.told] == [CANCELLED, CANCELLED, SUCCEEDED]
    assert tasks.lefts() == []


def test_a_hook_whose_chain_runs_again_waits_for_the_new_end(tasks: Tasks) -> None:
    # case M3
    later = tasks.hook.using(queue="later")
    whole = chain(tasks.fail.call(), tasks.ok).on_complete(later).on_failure(later)
    handle = tasks.mill.enqueue(whole)
    run_all(tasks.mill, queues=["default"])
    # given hooks that have not begun when the chain is retried
    assert handle.retry()
    run_all(tasks.mill, queues=["later"])
    assert tasks.told == []
    # when
    tasks.is_broken = False
    run_all(tasks.mill, scheduled=True)
    # then the hook for a failure has nothing to tell
    assert [ended.state for ended in tasks.told] == [SUCCEEDED]
    assert tasks.lefts() == []


def test_a_call_that_waits_for_any_end_waits_for_the_end_of_a_retry(tasks: Tasks) -> None:
    # case M3
    flow = Flow()
    flow.add(tasks.ok.using(queue="later").call(flow.add(tasks.fail.call()), "x"), waits="any")
    handle = tasks.mill.enqueue(flow)
    run_all(tasks.mill, queues=["default"])
    assert handle.retry()
    run_all(tasks.mill, queues=["later"])
    assert tasks.ran == ["fail"]
    tasks.is_broken = False
    run_all(tasks.mill, scheduled=True)
    assert tasks.ran == ["fail", "fail", "x"]


@pytest.mark.parametrize("act", ["cancel", "alter", "delete"])
def test_the_id_of_a_chain_or_group_stands_for_its_jobs(tasks: Tasks, act: str) -> None:
    # case M2
    mill, ok = tasks.mill, tasks.ok
    members = mill.enqueue(group([ok.call(), group([ok.call(), ok.call()])]))
    steps = mill.enqueue(chain(ok.call(), group([ok.call(), ok.call()]), ok.call()))
    single = ok.enqueue()
    for whole in (members, steps):
        job = mill.job(whole.id)
        assert {
            "cancel": job.cancel,
            "alter": lambda job=job: job.alter(queue="other"),
            "delete": job.delete,
        }[act]()
    left = {job.id for job in mill.jobs(queue="default", state=["ready", "waiting"])}
    assert left == {single.id}
    if act == "alter":
        assert len(list(mill.jobs(queue="other"))) == 7
    if act == "cancel":
        assert (members.state, steps.state) == (FAILED, CANCELLED)
        assert not mill.job(members.id).cancel()
    if act == "delete":
        assert not mill.job(steps.id).delete()


def test_an_interrupted_delete_of_a_chain_or_group_is_completed_by_its_id(tasks: Tasks) -> None:
    # case M2
    mill, ok = tasks.mill, tasks.ok
    for whole in (group([ok.call()] * 2), chain(ok.call(), ok.call())):
        handle = mill.enqueue(whole)
        mill.broker.delete([handle.id])  # the first step of the delete
        assert mill.job(handle.id).delete()
        assert not mill.job(handle.id).delete()
        assert mill.jobs().page().records == []


def test_of_a_group_and_its_members_the_group_is_deleted_first(tasks: Tasks) -> None:
    # case M2: after the last member the hook would start
    mill, ok = tasks.mill, tasks.ok
    handle = mill.enqueue(group([ok.call()] * 2).on_complete(tasks.hook))
    ids = [handle[0].id, handle.id, handle[1].id, handle.id]
    assert delete_jobs(mill.runtime, ids) == [True] * 4
    assert mill.jobs().page().records == []
    run_all(mill)
    assert tasks.told == []


# -- the records of groups -----------------------------------------------------------------------


@pytest.mark.parametrize("act", ["purge", "purge now", "delete"])
def test_an_act_on_the_queue_of_one_member_leaves_the_group_to_the_others(
    tasks: Tasks, act: str
) -> None:
    # case M4
    mill, ok = tasks.mill, tasks.ok
    members = [ok.using(queue=queue).call() for queue in ("qa", "qb", "qb")]
    handle = mill.enqueue(group(members).on_complete(tasks.hook))
    # when
    queue = mill.queue("qa")
    assert (queue.delete(force=True) if act == "delete" else queue.purge(now="now" in act)) == 1
    run_all(mill, queues=["default"])
    # then the group goes on
    assert (handle.state, handle.progress) == (State.WAITING, (1, 3))
    assert tasks.told == []
    run_all(mill)
    assert tasks.ran == ["ok", "ok"]
    [ended] = tasks.told
    assert (ended.id, ended.state, ended.result) == (handle.id, FAILED, [None, "ok", "ok"])


def test_the_record_of_a_group_is_no_job_of_users(tasks: Tasks) -> None:
    # case M4
    mill, ok = tasks.mill, tasks.ok
    inner = group(ok.using(queue="qb").call() for _ in range(1200))
    handle = mill.enqueue(group([ok.using(queue="qa").call(), inner]))
    # then no list and no number has it
    assert {row.name: row.size for row in mill.queues()} == {"qa": 1, "qb": 1200}
    ids = {job.id for job in mill.jobs()}
    assert len(ids) == 1201
    assert not ids & {handle.id, handle[1].id}
    assert len(list(mill.jobs(group=handle.id))) == 1201
    page = mill.jobs().page(limit=1)
    assert len(page.records) == 1
    assert len(mill.jobs().page(limit=5000, cursor=page.cursor).records) == 1200
    # but who asks for groups gets them
    assert {job.id for job in mill.jobs(task="tidemill.group", state="waiting")} == {
        handle.id,
        handle[1].id,
    }
    # and no act on queues changes it
    assert handle.alter(queue="qc") == 1201
    assert mill.broker.alter([handle.id], queue="qc", rank=7) == [False]
    assert handle.refresh().envelope.queue == "tidemill.groups"
    with pytest.raises(InvalidOption, match="groups"):
        mill.queue("tidemill.groups").purge()
    with pytest.raises(InvalidOption, match="groups"):
        mill.queue("tidemill.groups").delete(force=True)
    assert mill.queue("qc").purge() == 1201
    assert handle.state is FAILED


# -- signatures ----------------------------------------------------------------------------------


@pytest.fixture
def signed(kind: Kind, tmp_path: Path, need: Callable[[Feature], None]) -> Iterator[Tasks]:
    """Tasks of an app that signs its jobs."""
    need(Feature.FLOWS)
    with Tidemill(kind.store_url(tmp_path), secret_keys=["new", "old"]) as mill:
        yield Tasks(mill)


def test_each_part_of_a_signed_composition_gets_its_results(signed: Tasks) -> None:  # case M12
    signed.is_broken = False
    for name, shape in signed.shapes().items():
        handle = signed.mill.enqueue(shape)
        run_all(signed.mill)
        assert handle.wait(0) is SUCCEEDED, name
    hooked = chain(signed.ok, signed.ok.call(name="last"))
    signed.mill.enqueue(hooked.on_success(signed.hook))
    run_all(signed.mill)
    assert [ended.result for ended in signed.told] == ["last"]


@pytest.mark.parametrize("by", [None, "another key", "the old key"])
def test_a_step_gets_only_results_that_are_signed(
    signed: Tasks, by: str | None
) -> None:  # case M12, case S4
    # given a chain whose first step somebody completes who writes to the store
    handle = signed.mill.enqueue(chain(signed.ok, signed.ok.call(name="then")))
    owner = hands(signed)
    [lease] = owner.take()
    forged, first = pack("forged"), handle.steps[0].id
    if by is not None:
        key = b"old" if by == "the old key" else b"other"
        forged = sign_result(first, forged, key)
    assert owner.settle(lease, result=forged)
    # when the next step comes
    run_all(signed.mill)
    # then the step runs only with a result that a key of the app has signed
    assert (signed.ran == ["then"]) == (by == "the old key")
    if by != "the old key":
        with pytest.raises(JobFailed, match=f"bad signature: the result of job {first} "):
            handle.result(0)


def test_the_signed_result_of_another_job_is_refused(signed: Tasks) -> None:  # case M12, case S4
    handle = signed.mill.enqueue(chain(group([signed.ok, signed.ok]), signed.ok.call(name="then")))
    owner = hands(signed)
    for lease in owner.take(2):
        result = sign_result("another job", pack("forged"), b"new")
        assert owner.settle(lease, result=result)
    run_all(signed.mill)
    with pytest.raises(JobFailed, match="bad signature: the result of job"):
        handle.result(0)
    assert signed.ran == []
