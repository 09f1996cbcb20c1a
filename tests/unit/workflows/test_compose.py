"""Chains, groups, flows and hooks, from the calls to the handles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidemill import (
    DuplicateJob,
    Ended,
    Flow,
    InvalidOption,
    JobCancelled,
    JobFailed,
    JobNotFound,
    ResultTimeout,
    State,
    Tidemill,
    TidemillError,
    chain,
    group,
    map_many,
)
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.client.compositions import steps_of
from tidemill.client.explain import explain_in
from tidemill.errors import FeatureMissing
from tidemill.testing import run_all, worker
from tidemill.workflows.enqueue import JOBS_PER_PUT

MillMaker = Callable[..., Tidemill]
SUCCEEDED, FAILED, CANCELLED = State.SUCCEEDED, State.FAILED, State.CANCELLED


class Tasks:
    """Some tasks of an app, and what its hooks were told."""

    def __init__(self, mill: Tidemill) -> None:
        self.mill = mill
        self.told: list[tuple[str, Ended]] = []
        self.inc = mill.task(name="inc")(inc)
        self.total = mill.task(name="total")(total)
        self.boom = mill.task(name="boom", retries=0)(boom)
        self.pair = mill.task(name="pair")(pair)

        @mill.task(name="hook", retries=0)
        def hook(ended: Ended, why: str = "") -> None:
            self.told.append((why, ended))

        self.hook = hook

    def hooked(self, what: Any) -> Any:
        """With all three hooks, and one of them twice."""
        return (
            what.on_success(self.hook.call("success"))
            .on_failure(self.hook.call("failure"))
            .on_complete(self.hook.call("complete"))
            .on_complete(self.hook.call("again"))
        )

    def run(self, what: Any) -> Any:
        """Enqueue and run all there is."""
        handle = self.mill.enqueue(what)
        run_all(self.mill)
        return handle

    @property
    def fired(self) -> list[str]:
        return sorted(why for why, _ in self.told)


def inc(x: int, by: int = 1) -> int:
    return x + by


def total(numbers: list[Any]) -> int:
    return sum(total(n) if isinstance(n, list) else n for n in numbers if n is not None)


def pair(left: Any, right: Any) -> list[Any]:
    return [left, right]


def boom(*_: Any) -> None:
    raise ValueError("no")


@pytest.fixture(params=["stored", "sync"])
def both(request: pytest.FixtureRequest, make_mill: MillMaker) -> Tasks:
    return Tasks(make_mill(sync=request.param == "sync"))


@pytest.fixture
def tasks(mill: Tidemill) -> Tasks:
    return Tasks(mill)


def ids(mill: Tidemill) -> set[str]:
    return {r.envelope.id for r in mill.jobs(Filter()).page(limit=1000).records}


# -- chains --------------------------------------------------------------------------------------


def test_each_step_gets_the_result_before_it(both: Tasks) -> None:
    # case C1
    handle = both.run(chain(both.inc.call(1), both.inc, both.inc.call(by=5)))
    assert handle.result(0) == 8
    assert [step.result(0) for step in handle.steps] == [2, 3, 8]


def test_a_failed_step_stops_the_chain_and_the_hook_fires_once(tasks: Tasks) -> None:
    # case C1
    handle = tasks.run(tasks.hooked(chain(tasks.inc.call(1), tasks.boom, tasks.inc, tasks.inc)))
    assert [step.state for step in handle.steps] == [SUCCEEDED, FAILED, CANCELLED, CANCELLED]
    with pytest.raises(JobFailed, match="ValueError: no"):
        handle.result(0)
    assert tasks.fired == ["again", "complete", "failure"]
    end = tasks.told[0][1]
    assert (end.id, end.state, end.error) == (handle.id, FAILED, "ValueError: no")
    assert end.failed == handle.steps[1].id
    assert not end.succeeded


def test_a_chain_may_end_with_a_chain(both: Tasks) -> None:
    inc, told = both.inc, both.hook
    inner = chain(inc, chain(inc, inc).on_success(told.call("inner")))
    whole = both.run(chain(inc.call(1), inc, inner).on_success(told.call("whole")))
    assert whole.result(0) == 6
    assert both.fired == ["inner", "whole"]
    numbers = [whole.steps[0].id, whole.steps[1].id, whole.steps[2].steps[0].id]
    assert numbers == [f"{whole.id}.{number:04d}" for number in range(3)]


def test_the_ids_of_chains_in_chains(both: Tasks) -> None:
    inc, total = both.inc, both.total
    ends = chain(inc, chain(inc, inc))
    flow = Flow()
    flow.add(inc.call(flow.add(chain(inc.call(1), inc))))
    shapes: list[tuple[Any, str]] = [
        (chain(inc.call(1)), ""),
        (chain(inc.call(1), inc, inc), ".0000 .0001"),
        (chain(chain(inc.call(1), inc)), ".0000"),
        (chain(inc.call(1), chain(inc)), ".0000"),
        (chain(chain(inc.call(1), inc), inc), ".0000 .0000.0000"),
        (chain(group([chain(inc.call(1), inc)]), total), ".0000.0000000 .0000.0000000.0000"),
        (chain(inc.call(1), group([inc, inc])), ".0000 .0000000 .0000001"),
        (flow, ".0000000 .0000000.0000 .0000001"),
        # a chain at the end goes on with the numbers of the whole
        (chain(inc.call(1), chain(inc, inc)), ".0000 .0001"),
        (chain(inc.call(1), chain(inc, ends)), ".0000 .0001 .0002 .0003"),
        (chain(inc.call(1), chain(chain(inc, inc), inc)), ".0000 .0001 .0001.0000"),
        (
            chain(inc.call(1), chain(inc, group([ends]))),
            ".0000 .0001 .0000000 .0000000.0000 .0000000.0001",
        ),
        (chain(chain(inc.call(1), ends), inc), ".0000 .0000.0000 .0000.0001 .0000.0002"),
    ]
    for number, (shape, endings) in enumerate(shapes):
        both.run(shape.using(id=f"n{number}"))
        parts = {name for name in ids(both.mill) if name.startswith(f"n{number}.")}
        assert parts == {f"n{number}{ending}" for ending in endings.split()}, repr(shape)


def test_a_chain_ends_as_the_step_that_stopped_it(tasks: Tasks) -> None:
    mill, inc, boom, total = tasks.mill, tasks.inc, tasks.boom, tasks.total
    flow = Flow()
    flow.add(inc.call(1), after=[flow.add(boom.call())])
    shapes = {
        "step": (chain(inc.call(1), boom, inc, inc), ".0001"),
        "chain first": (chain(chain(boom.call(), inc), inc), ".0000.0000"),
        "chain last": (chain(boom.call(), chain(inc, inc)), ".0000"),
        "group": (
            chain(group([boom.call().on_failure(boom), inc.call(1)]), total),
            ".0000.0000000",
        ),
        "before a group": (chain(boom.call(), group([inc, chain(inc, inc)]), total), ".0000"),
        "flow": (chain(flow, total), ".0000.0000000"),
    }
    for name, (shape, ending) in shapes.items():
        handle = tasks.run(shape)
        for whole in (handle, mill.job(handle.id)):
            assert whole.refresh().state is CANCELLED  # the record of the last step
            assert repr(whole) == f"<job {handle.id} ?>", name
            assert (whole.state, whole.error, whole.wait(0)) == (FAILED, "ValueError: no", FAILED)
            assert asyncio.run(whole.astate()) == asyncio.run(whole.await_end(0)) == FAILED, name
            assert asyncio.run(whole.aerror()) == "ValueError: no", name
            assert repr(whole) == f"<job {handle.id} failed>", name
            assert '<td style="text-align:left">failed</td>' in whole._repr_html_(), name
            with pytest.raises(JobFailed) as caught:
                whole.result(0)
            assert (caught.value.job_id, caught.value.error) == (
                handle.id + ending,
                "ValueError: no",
            )
            assert "in boom" in caught.value.traceback, name
        if name != "chain last":
            assert handle.steps[-1].state is CANCELLED, name
    assert {job.state for job in mill.jobs(state="cancelled")} == {CANCELLED}
    late = tasks.run(group([chain(boom.call(), inc)]))
    assert [member.state for member in late.failures] == [FAILED]


def test_a_chain_that_ends_with_a_group_ends_as_the_group(tasks: Tasks) -> None:
    handle = tasks.run(chain(tasks.boom.call(), group([tasks.inc, tasks.inc])))
    for whole in (handle, tasks.mill.job(handle.id)):
        assert (whole.state, whole.error) == (FAILED, "2 of its jobs did not succeed")
        with pytest.raises(JobFailed) as caught:
            whole.result(0)
        assert (caught.value.job_id, caught.value.error) == (f"{handle.id}.0000", "ValueError: no")
        assert "in boom" in caught.value.traceback


def test_the_state_of_a_chain_in_a_chain_is_its_own(tasks: Tasks) -> None:
    inner = chain(tasks.inc, tasks.inc)
    handle = tasks.run(chain(tasks.boom.call(), inner, inner))
    assert [step.state for step in handle.steps] == [FAILED, CANCELLED, CANCELLED]
    assert handle.state is FAILED


def test_a_cancelled_or_retried_chain_is_not_failed(tasks: Tasks) -> None:
    handle = tasks.mill.enqueue(chain(tasks.inc.call(1), tasks.inc))
    assert handle.steps[0].cancel()
    assert (handle.state, tasks.mill.job(handle.id).state) == (CANCELLED, CANCELLED)
    assert handle.retry()
    assert handle.state is State.WAITING
    run_all(tasks.mill)
    assert handle.state is SUCCEEDED


def test_the_state_of_a_chain_reads_one_job_a_step(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill, inc, boom = tasks.mill, tasks.inc, tasks.boom
    reads: list[str] = []
    for name in ("get", "find", "wait_for"):
        call = getattr(mill.broker, name)

        def counted(*args: Any, _call: Any = call, _name: str = name, **kwargs: Any) -> Any:
            reads.append(_name)
            return _call(*args, **kwargs)

        monkeypatch.setattr(mill.broker, name, counted)

    def read(job_id: str) -> tuple[State, list[str]]:
        reads.clear()
        return mill.job(job_id).state, [*reads]

    failed = tasks.run(chain(inc.call(1), boom, inc, inc, inc))
    assert read(failed.id) == (FAILED, ["get"] * 4)
    # one read for each other job
    assert read(failed.steps[1].id) == (FAILED, ["get"])
    assert read(failed.steps[3].id) == (CANCELLED, ["get"])
    assert read(tasks.run(chain(inc.call(1), inc)).id) == (SUCCEEDED, ["get"])
    stopped = mill.enqueue(inc.call(1))
    stopped.cancel()
    assert read(stopped.id) == (CANCELLED, ["get"])
    assert read(tasks.run(group([boom.call()])).id) == (FAILED, ["get"])
    flow = Flow()
    after = flow.add(inc.call(1), after=[flow.add(boom.call())])
    assert read(f"{tasks.run(flow).id}.{after.index:07d}") == (CANCELLED, ["get"])


def test_the_steps_of_a_chain(tasks: Tasks) -> None:
    mill, inc, boom = tasks.mill, tasks.inc, tasks.boom

    def numbers(job_id: str) -> list[tuple[int, str]]:
        found = steps_of(mill.runtime, mill.job(job_id).refresh())
        return [(number, step.envelope.id) for number, step in found.items()]

    many = tasks.run(chain(inc.call(1), group([inc, inc]), chain(boom, inc), *[inc] * 120))
    steps = [f"{many.id}.{number:04d}" for number in range(122)] + [many.id]
    assert numbers(many.id) == [*enumerate(steps)]
    # steps that are no longer kept, and ids of others that look alike
    mill.broker.delete(steps[:2])
    inc.using(id=steps[1]).enqueue(1)
    assert numbers(many.id) == [*enumerate(steps)][2:]
    plain = inc.using(id="plain").enqueue(1)
    inc.using(id="plain.0000").enqueue(1)
    assert numbers(plain.id) == numbers(steps[5]) == []
    assert numbers(tasks.run(group([chain(inc.call(1), inc)])).id) == []


def test_hooks_of_a_single_call(both: Tasks) -> None:
    handle = both.run(both.hooked(both.inc.call(1)))
    assert handle.result(0) == 2
    assert both.fired == ["again", "complete", "success"]


def test_a_cancelled_chain_does_nothing_more(tasks: Tasks) -> None:
    handle = tasks.mill.enqueue(tasks.hooked(chain(tasks.inc.call(1), tasks.inc)))
    assert handle.cancel()
    run_all(tasks.mill)
    assert tasks.fired == ["again", "complete", "failure"]
    assert tasks.told[0][1].state is CANCELLED
    with pytest.raises(JobCancelled):
        handle.result(0)
    assert not handle.cancel()


# -- groups --------------------------------------------------------------------------------------


def test_results_of_a_group_come_in_order(both: Tasks) -> None:
    # case C2
    handle = both.run(group([both.inc.call(n) for n in range(5)]))
    assert handle.result(0) == [1, 2, 3, 4, 5]
    assert (len(handle), handle.count(), handle.count(failures=True)) == (5, 5, 0)
    assert handle.state is SUCCEEDED
    assert handle.failures == []
    assert sorted(job.result(0) for job in handle) == [1, 2, 3, 4, 5]
    assert handle[1].result(0) == handle[-4].result(0) == 2


def test_groups_nest(both: Tasks) -> None:
    # case C2
    i = both.inc
    nested = group([i.call(0), group([i.call(1), group([]), chain(i.call(2), i)]), i.call(5)])
    assert both.run(nested).result(0) == [1, [2, [], 4], 6]
    whole = chain(i.call(0), group([i, i.call(by=2), group([i.call(by=3)])]), both.total, i)
    handle = both.run(whole)
    assert handle.result(0) == 2 + 3 + 4 + 1
    assert handle.steps[1].result(0) == [2, 3, [4]]
    handle = both.run(chain(group([i.call(1), i.call(2)]), group([both.total] * 2)))
    assert handle.result(0) == [5] * 2


def test_a_group_with_a_failing_member(tasks: Tasks) -> None:
    # case C2
    members = [tasks.inc.call(1), tasks.boom.call(), group([tasks.boom.call(), tasks.inc.call(2)])]
    handle = tasks.run(tasks.hooked(group(members)))
    assert (handle.count(), handle.count(failures=True), handle.state) == (3, 2, FAILED)
    assert [member.id for member in handle.failures] == [handle[1].id, handle[2].id]
    with pytest.raises(JobFailed, match=handle[1].id):
        handle.result(0)
    one, two, (three, four) = handle.result(0, return_exceptions=True)
    assert (one, four) == (2, 3)
    assert isinstance(two, JobFailed)
    assert isinstance(three, JobFailed)
    assert tasks.fired == ["again", "complete", "failure"]
    end = tasks.told[0][1]
    assert end.result == [2, None, [None, 3]]
    assert (end.id, end.state) == (handle.id, FAILED)
    assert "2 of its jobs" in end.error
    # and all of it again
    tasks.boom.function = lambda: 7
    assert handle.retry() == 2
    run_all(tasks.mill)
    assert handle.result(0) == [2, 7, [7, 3]]
    assert tasks.fired == ["again", "complete", "failure", "success"]


def test_counts_while_it_runs(tasks: Tasks) -> None:
    # cases C2, C3
    mill = tasks.mill
    handle = mill.enqueue(group([tasks.inc.call(1), tasks.boom.call(), tasks.inc.call(2)]))
    held = mill.enqueue(group([tasks.inc.using(queue="other").call(1), tasks.inc.call(2)]))
    assert handle.progress == (0, 3)
    run_all(mill, queues=["default"])
    assert (handle.count(), handle.count(failures=True)) == (3, 1)
    assert held.progress == (1, 2)
    assert held.state is State.WAITING
    with pytest.raises(ResultTimeout, match="1 of 2 members"):
        held.result(timeout=0.01)
    with pytest.raises(ResultTimeout):
        held.wait(timeout=0.01, progress=True)
    with pytest.raises(ResultTimeout):
        list(held.as_completed(timeout=0.01))
    assert next(iter(held)).result(0) == 3


def test_a_map_is_one_list_in_order(both: Tasks) -> None:
    # case C3
    handle = both.run(map_many(both.inc, range(10)))
    assert handle.result(0, progress=True) == list(range(1, 11))
    assert both.run(map_many(both.inc.using(priority=1), iter([(1, 5), 2]))).result(0) == [6, 3]


def test_a_failed_hook_does_not_hide_the_member_that_ended_its_group(tasks: Tasks) -> None:
    handle = tasks.mill.enqueue(
        group([tasks.inc.call(1).using(delay=900), tasks.inc.call(2)]).on_failure(tasks.boom)
    )
    first = tasks.mill.job(f"{handle.id}.0000000")
    assert first.cancel()
    run_all(tasks.mill)
    with pytest.raises(JobFailed, match=f"{first.id}, which was cancelled"):
        tasks.mill.job(handle.id).result()
    assert tasks.mill.job(handle.id).state is FAILED


def test_a_group_is_found_again_by_its_id(tasks: Tasks) -> None:
    handle = tasks.run(map_many(tasks.inc, range(3)).using(id="nightly"))
    assert handle.id == "nightly"
    again = tasks.mill.group("nightly")
    assert again.result(0) == [1, 2, 3]
    assert again == handle
    assert len({again, handle}) == 1
    with pytest.raises(DuplicateJob):
        tasks.mill.enqueue(map_many(tasks.inc, range(3)).using(id="nightly"))
    with pytest.raises(JobNotFound, match="not of a group"):
        tasks.mill.group("nightly.0000001").refresh()
    with pytest.raises(JobNotFound):
        tasks.mill.group("daily").result(0)


def test_a_long_group_is_put_piece_by_piece(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * JOBS_PER_PUT + 7
    sizes: list[int] = []
    mill, put = tasks.mill, tasks.mill.broker.put

    def counted(jobs: Any, **options: Any) -> Any:
        sizes.append(len(jobs))
        return put(jobs, **options)

    monkeypatch.setattr(mill.broker, "put", counted)
    for arguments in (range(count), iter(range(count))):
        sizes.clear()
        whole = chain(tasks.hooked(map_many(tasks.inc, arguments)), tasks.total)
        handle = mill.enqueue(whole)
        assert max(sizes) <= JOBS_PER_PUT + 7
        assert len(sizes) == 3
        run_all(mill, concurrency=2)
        assert handle.result(0) == sum(range(1, count + 1))
        assert len(handle.steps[0]) == count
        assert handle.steps[0].result(0) == list(range(1, count + 1))
    assert tasks.fired == sorted(["again", "complete", "success"] * 2)


def test_an_iterator_that_fails_leaves_nothing_to_run(tasks: Tasks) -> None:
    def calls() -> Iterator[Any]:
        for n in range(JOBS_PER_PUT + 5):
            yield tasks.inc.call(n)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        tasks.mill.enqueue(chain(tasks.hooked(group(calls())), tasks.total))
    run_all(tasks.mill)
    assert tasks.told == []
    (row,) = tasks.mill.queues()
    assert (row.size, row.succeeded) == (0, 0)


def test_an_empty_group_has_succeeded(both: Tasks) -> None:
    handle = both.run(both.hooked(group([])))
    assert handle.result(0) == []
    assert both.fired == ["again", "complete", "success"]
    assert both.run(chain(both.inc.call(1), group([]), both.total)).result(0) == 0


def test_cancelling_a_group_reaches_all_its_members(tasks: Tasks) -> None:
    # law 14
    inner = group([tasks.inc.call(1), chain(tasks.inc.call(1), tasks.inc)])
    handle = tasks.mill.enqueue(tasks.hooked(group([tasks.inc.call(1), inner])))
    assert handle.cancel() == 4 - 1  # the second step of the chain falls with the first
    run_all(tasks.mill)
    assert handle.state is FAILED
    assert tasks.fired == ["again", "complete", "failure"]
    assert tasks.mill.queues()[0].succeeded == 3


def test_deleting_a_group_leaves_nothing(tasks: Tasks) -> None:
    tasks.mill.enqueue(tasks.inc.call(1).using(id="other"))
    inner = group([tasks.inc.call(1), chain(tasks.inc.call(1), tasks.inc)])
    for whole in (group([inner, tasks.inc.call(2)]), chain(tasks.inc.call(1), tasks.inc)):
        handle: Any = tasks.mill.enqueue(tasks.hooked(whole))
        assert handle.delete()
        assert ids(tasks.mill) == {"other"}
        assert not handle.delete()
    run_all(tasks.mill)
    assert tasks.told == []


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_the_end_of_a_group_spares_jobs_with_similar_ids(tasks: Tasks, end: str) -> None:
    # given jobs of users whose ids begin with the id of a group
    others = {"report.2024", "report.0000000.pdf", "report.on_success"}
    for job_id in others:
        tasks.mill.enqueue(tasks.inc.call(1).using(id=job_id))
    handle = tasks.mill.enqueue(group([tasks.inc.call(1)]).using(id="report"))
    # when the group ends
    getattr(handle, end)()
    # then they are still ready
    ready = tasks.mill.broker.find(Filter(states=frozenset({State.READY}))).records
    assert {record.envelope.id for record in ready} == others


# -- flows ---------------------------------------------------------------------------------------


def diamond(tasks: Tasks) -> Flow:
    flow = Flow()
    a = flow.add(tasks.inc.call(0))
    b, c = flow.add(tasks.inc.call(a, by=10)), flow.add(tasks.inc.call(a, by=20))
    flow.add(tasks.total.call([b, c]))
    return flow


def test_a_diamond_runs_its_end_once(both: Tasks) -> None:
    # case C4
    handle = both.run(both.hooked(diamond(both)))
    assert handle.result(0) == [1, 11, 21, 32]
    assert both.fired == ["again", "complete", "success"]
    assert both.run(chain(diamond(both), both.total)).result(0) == 65


def test_nodes_after_a_failed_node_are_cancelled_unless_they_wait_for_any(tasks: Tasks) -> None:
    flow = Flow()
    bad = flow.add(tasks.boom.call())
    flow.add(tasks.inc.call(bad))
    kept = flow.add(tasks.pair.call(bad, 1), waits="any")
    flow.add(tasks.pair.call(kept, [kept, 2]), after=[bad], waits="any")
    handle = tasks.run(flow)
    assert handle[1].state is CANCELLED
    assert [handle[n].result(0) for n in (2, 3)] == [[None, 1], [[None, 1], [[None, 1], 2]]]


def test_nodes_may_be_compositions(both: Tasks) -> None:
    flow = Flow()
    a = flow.add(both.inc.call(0))
    many = flow.add(group([both.inc.call(a), chain(both.inc.call(a), both.inc)]))
    after = flow.add(both.inc.call(100), after=[many])
    flow.add(chain(both.pair.call(many, after), both.total))
    assert both.run(flow).result(0) == [1, [2, 3], 101, 106]


def test_a_flow_may_come_after_something(both: Tasks) -> None:
    flow = Flow()
    first = flow.add(both.inc)
    flow.add(both.inc.call(first))
    assert both.run(chain(both.inc.call(1), flow, both.total)).result(0) == 3 + 4


def test_a_node_of_another_flow_is_refused(tasks: Tasks) -> None:
    node = Flow().add(tasks.inc.call(1))
    with pytest.raises(InvalidOption, match="no node of this flow"):
        Flow().add(tasks.inc.call(node))
    with pytest.raises(InvalidOption, match="waits"):
        Flow().add(tasks.inc.call(1), waits="failure")


def test_a_missing_result_is_told(tasks: Tasks) -> None:
    handle = tasks.mill.enqueue(chain(tasks.inc.call(1), tasks.inc.using(queue="later")))
    run_all(tasks.mill, queues=["default"])
    assert handle.steps[0].delete()
    run_all(tasks.mill)
    error = tasks.mill.job(handle.id).error
    assert f"the result of job {handle.steps[0].id}, which is an argument, is missing" in error
    assert "no longer kept" in error


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "does not fit"])
def test_a_hook_that_fails_changes_nothing(make_mill: MillMaker, how: str) -> None:
    # cases C5, T2
    tasks = Tasks(make_mill(allow_imports=["math.hypot"]))
    hook: Any = tasks.boom if how == "fails" else tasks.mill.call("math.hypot")
    for what, state in (
        (tasks.inc.call(1), SUCCEEDED),
        (tasks.boom.call(), FAILED),
        (group([tasks.inc.call(1)]), SUCCEEDED),
    ):
        handle = tasks.run(what.on_complete(hook))
        assert handle.state is state
        assert tasks.mill.job(f"{handle.id}.on_complete").state is FAILED


def test_steps_and_members_have_hooks_of_their_own(both: Tasks) -> None:
    step = both.inc.call(1).on_success(both.hook.call("step"))
    member = both.inc.call(5).on_complete(both.hook.call("member"))
    last = both.inc.call().on_success(both.hook.call("last"))
    whole = chain(group([step, member]), both.total, last).on_success(both.hook.call("whole"))
    assert both.run(whole).result(0) == 9
    assert both.fired == ["last", "member", "step", "whole"]


# -- storing -------------------------------------------------------------------------------------


def test_a_composition_inside_a_batch(tasks: Tasks) -> None:
    with tasks.mill.batch():
        one = tasks.mill.enqueue(chain(tasks.inc.call(1), tasks.inc))
        two = tasks.mill.enqueue(tasks.hooked(map_many(tasks.inc, range(3))))
        with pytest.raises(TidemillError):
            two.result()
        assert ids(tasks.mill) == set()
    run_all(tasks.mill)
    assert one.result(0) == 3
    assert two.result(0) == [1, 2, 3]
    assert tasks.fired == ["again", "complete", "success"]


def test_a_composition_inside_a_transaction(tasks: Tasks) -> None:
    # law 17
    if Feature.TRANSACTIONS not in tasks.mill.broker.features:
        with pytest.raises(FeatureMissing, match="txn="):
            tasks.mill.enqueue(chain(tasks.inc.call(1), tasks.inc).using(txn=object()))
        return
    env = tasks.mill.broker._store.env  # type: ignore[attr-defined]
    whole = chain(map_many(tasks.inc, range(JOBS_PER_PUT + 9)), tasks.total)
    with env.begin(write=True) as txn:
        tasks.mill.enqueue(whole.using(txn=txn))
        txn.abort()
    assert ids(tasks.mill) == set()
    with env.begin(write=True) as txn:
        handle = tasks.mill.enqueue(whole.using(txn=txn))
        hooked = tasks.mill.enqueue(tasks.hooked(tasks.inc.using(txn=txn).call(1)))
    run_all(tasks.mill)
    assert handle.result(0) == sum(range(1, JOBS_PER_PUT + 10))
    assert hooked.result(0) == 2


@pytest.mark.parametrize("serializer", ["msgpack", "pickle"])
def test_a_signed_body_stays_signed(make_mill: MillMaker, serializer: str) -> None:
    # law 18
    tasks = Tasks(make_mill(secret_keys=["k"], serializer=serializer))
    handle = tasks.run(tasks.hooked(chain(diamond(tasks), tasks.total)))
    assert handle.result(0) == 65
    assert tasks.fired == ["again", "complete", "success"]
    page = tasks.mill.jobs(Filter()).page(limit=100)
    assert all(record.envelope.signature for record in page.records)


def test_calls_that_cannot_be_a_part_are_refused(tasks: Tasks) -> None:
    keyed, inc_call = tasks.inc.using(key="k"), tasks.inc.call(1)
    behind = chain(tasks.inc.call(1), map_many(tasks.inc, range(10_001)))
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("key", lambda: chain(tasks.inc.call(1), keyed)),
        ("key", lambda: group([keyed.call(1)])),
        ("key", lambda: Flow().add(keyed.call(1))),
        ("key", lambda: keyed.call(1).on_success(tasks.hook)),
        ("key", lambda: tasks.mill.enqueue(tasks.inc.call(1).on_success(keyed))),
        ("key", lambda: tasks.mill.enqueue(map_many(keyed, range(3)))),
        ("at least one", lambda: chain()),
        ("not 5", lambda: chain(5)),  # type: ignore[arg-type]
        ("list of calls", lambda: group(tasks.inc.call(1))),  # type: ignore[call-overload]
        ("hooks of its", lambda: tasks.mill.enqueue(inc_call.on_success(tasks.hooked(inc_call)))),
        ("ids of parts", lambda: tasks.mill.enqueue(group([tasks.inc.using(id="x").call(1)]))),
        ("txn= is for", lambda: tasks.mill.enqueue(group([tasks.inc.using(txn=1).call(1)]))),
        ("at most 10000", lambda: tasks.mill.enqueue(behind)),
    ]
    for match, attempt in refused:
        with pytest.raises(InvalidOption, match=match):
            attempt()
    assert ids(tasks.mill) == set()


def test_a_broker_without_flows_refuses(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = tasks.mill.broker
    monkeypatch.setattr(type(broker), "features", broker.features - {Feature.FLOWS})
    for what in (chain(tasks.inc.call(1)), tasks.inc.call(1).on_success(tasks.hook)):
        with pytest.raises(FeatureMissing, match="needs the feature flows"):
            tasks.mill.enqueue(what)
    with pytest.raises(FeatureMissing):
        tasks.mill.enqueue_many([tasks.inc.call(1).on_success(tasks.hook)])


# -- asyncio -------------------------------------------------------------------------------------


def test_the_same_from_asyncio(tasks: Tasks) -> None:
    mill = tasks.mill

    async def main() -> None:
        one = await mill.aenqueue(chain(tasks.inc.call(1), tasks.inc))
        two = await mill.aenqueue(map_many(tasks.inc, range(3)))
        three = await mill.aenqueue(tasks.inc.call(1).on_success(tasks.hook))
        assert (await one, await two, await three) == (3, [1, 2, 3], 2)
        assert await two.aresult(timeout=5) == [1, 2, 3]
        assert sorted([job.result(0) async for job in two]) == [1, 2, 3]
        assert await two.acount() == 3
        assert await two.aprogress() == (3, 3)
        assert await two.await_end() is SUCCEEDED
        assert await two.aretry() == await two.acancel() == 0
        async with mill.batch():
            await mill.aenqueue(chain(tasks.inc.call(1), tasks.inc))
        assert await two.adelete()

    with worker(mill):
        asyncio.run(main())


# -- looking -------------------------------------------------------------------------------------


def test_explain_names_the_jobs_before_and_the_job_that_dropped_it(tasks: Tasks) -> None:
    mill = tasks.mill

    def why(job_id: str) -> str:
        return explain_in(mill.broker, mill.job(job_id).refresh())

    first = group([tasks.inc.call(1), tasks.boom.call()])
    handle = mill.enqueue(chain(tasks.inc.call(1), tasks.boom, tasks.inc).on_failure(tasks.hook))
    whole = mill.enqueue(chain(first, tasks.total))
    one, two, three = handle.steps
    assert why(two.id) == f"It waits until 1 earlier job succeeds: {one.id} (ready)"
    assert "forgotten if all succeed" in why(f"{handle.id}.on_failure")
    assert mill.job(two.id).trail[-1].detail == "for 1 job before it"
    barrier = whole.steps[0].id
    assert why(barrier) == "It stands for a group: 2 jobs have not ended"
    assert f"{barrier} (waiting)" in why(whole.id)
    run_all(mill)
    assert "not run, since job" in why(three.id)
    assert "ValueError: no" in why(two.id)
    assert mill.job(three.id).trail[-1].what == "cancelled"
    last = mill.enqueue(chain(tasks.boom.call(), tasks.inc, tasks.inc))
    run_all(mill)
    assert f"it began with job {last.steps[0].id}, which failed: ValueError: no" in why(last.id)


def test_a_chain_that_failed_in_a_group_names_the_failed_step_and_its_error(tasks: Tasks) -> None:
    # Given a group with a chain whose first step fails.
    member = chain(tasks.boom.call(), tasks.inc, tasks.inc)
    whole = tasks.mill.enqueue(group([member, tasks.inc.call(1)]))
    run_all(tasks.mill)
    began = f"it began with job {whole[0].id}.0000, which failed: ValueError: no"
    # Then its error, and the explanation of the group, name this step and what it raised.
    for by_id in (whole, tasks.mill.job(whole.id)):
        with pytest.raises(JobFailed) as caught:
            by_id.result(0)
        assert (caught.value.job_id, caught.value.error) == (
            f"{whole[0].id}.0000",
            "ValueError: no",
        )
        assert "in boom" in caught.value.traceback
    assert explain_in(tasks.mill.broker, whole.refresh()).endswith(began)
