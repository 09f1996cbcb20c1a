"""Actions on all jobs that match: preview, run, stop, resume after a restart, first a few."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from dashboard_desk import Visitor, read, words

from tidemill import Fail, Tidemill
from tidemill.brokers.generic.audit import notes
from tidemill.core.clock import new_id
from tidemill.core.job import GROUP, State
from tidemill.dashboard import bulk, queues
from tidemill.dashboard.bulk import Bulk
from tidemill.dashboard.job_search import parse
from tidemill.dashboard.jobs import Done, act
from tidemill.errors import BrokerUnavailable, InvalidOption
from tidemill.testing import run_all

broken = threading.Event()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation soon sees the wish to stop, and the ends of the jobs that it retried first."""
    monkeypatch.setattr(bulk, "_LOOK_EVERY", 0.02)
    monkeypatch.setattr(bulk, "_PROBE_EVERY", 0.02)


@pytest.fixture
def anna(mill: Tidemill) -> Iterator[Visitor]:
    @mill.task(name="shop.pay", retries=0)
    def pay(order: int) -> int:
        if broken.is_set():
            raise Fail("the bank is closed")
        return order

    broken.set()
    yield Visitor(mill)
    broken.clear()


def failed_jobs(mill: Tidemill, count: int) -> list[str]:
    jobs = mill.enqueue_many([mill.tasks["shop.pay"].call(n) for n in range(count)])
    run_all(mill)
    return [job.id for job in jobs]


def ended(mill: Tidemill, bulk_id: str) -> Bulk:
    """The operation after its thread has ended."""
    for thread in threading.enumerate():
        if thread.name == f"bulk-{bulk_id[-8:]}":
            thread.join(30)
            assert not thread.is_alive()
    return bulk.get(mill, bulk_id)


def states(mill: Tidemill) -> set[str]:
    return {job.state for job in mill.jobs()}


def started(anna: Visitor, **form: str) -> str:
    location: str = anna.post("/bulk", **form).headers["location"]
    return location.removeprefix("/bulk/")


def test_the_preview_counts_and_shows_five_and_the_oldest(mill: Tidemill, anna: Visitor) -> None:
    ids = failed_jobs(mill, 8)
    text = anna.get("/bulk/new?act=retry&q=task:shop.pay")
    assert "Retry 8 jobs" in words(text)
    shown = re.findall(r'id="row-([0-9a-f]+)"', text)
    assert shown == [*ids[:2:-1], ids[0]]


@pytest.mark.parametrize("path", ["/bulk/new?act=delete&q=", "/bulk/new?act=delete&q=+"])
def test_an_empty_search_is_refused(anna: Visitor, path: str) -> None:
    assert "would match every job" in words(anna.get(path, 400))
    anna.post("/bulk", 400, act="delete", q="")


def test_a_search_means_the_states_in_which_the_action_makes_sense() -> None:
    retry = bulk.narrowed(parse("queue:mail"), "retry")
    assert str(retry) == "queue:mail state:failed"
    cancel = bulk.narrowed(parse("queue:mail"), "cancel")
    assert cancel.states == {State.WAITING, State.SCHEDULED, State.READY, State.RUNNING}
    assert str(bulk.narrowed(parse("queue:mail"), "delete")) == "queue:mail"
    again = bulk.narrowed(retry, "retry")
    assert again == retry


def test_all_matching_jobs_are_changed_and_audited(mill: Tidemill, anna: Visitor) -> None:
    failed_jobs(mill, 30)
    bulk_id = started(anna, act="retry", q="task:shop.pay", rate="0", expected="30")
    one = ended(mill, bulk_id)
    assert (one.state, one.done, one.refused) == ("done", 30, 0)
    assert states(mill) == {State.READY}
    assert [(n.what, n.count) for n in reversed([*notes(mill.broker)])] == [
        ("started bulk retry", 30),
        ("finished bulk retry", 30),
    ]
    assert "done" in words(anna.get(f"/bulk/{bulk_id}"))
    assert "30 of 30" in words(anna.get("/bulk"))
    assert anna.act(f"/bulk/{bulk_id}/forget").startswith("ok")
    assert bulk.operations(mill) == []


def test_all_that_match_get_another_queue_and_priority(mill: Tidemill, anna: Visitor) -> None:
    ids = [mill.queue("mail").put(n).id for n in range(30)]
    later = mill.queue("mail").put("x", delay=1000).id
    assert "Change queue or priority of 31 jobs" in words(
        anna.get("/bulk/new?act=alter&q=queue:mail")
    )
    anna.post("/bulk", 400, act="alter", q="queue:mail", rate="0")
    # when
    form = {"to_queue": "slow", "to_priority": "-5", "rate": "0", "expected": "31"}
    bulk_id = started(anna, act="alter", q="queue:mail", **form)
    one = ended(mill, bulk_id)
    # then
    assert (one.state, one.done, one.refused) == ("done", 31, 0)
    records = [mill.job(i).refresh() for i in (*ids, later)]
    assert {(r.envelope.queue, r.public()["priority"]) for r in records} == {("slow", -5)}
    assert records[-1].state is State.SCHEDULED
    whats = [note.what for note in notes(mill.broker)]
    assert whats == [
        f"{how} bulk alter to queue slow, priority -5" for how in ("finished", "started")
    ]
    assert "queue slow, priority -5" in words(anna.get(f"/bulk/{bulk_id}"))


def test_an_operation_outlives_its_process(make_mill: Any) -> None:
    # given an app whose process ends in the middle
    first = make_mill()
    if first.url.startswith("memory"):
        return  # another process sees no jobs of memory://
    jobs = [first.queue("q").put(n).id for n in range(12)]
    one = bulk.start(first, Bulk(id=new_id(), action="delete", query="queue:q", rate=4))
    first.close()
    # then another process finds it interrupted, and resumes it
    second = make_mill()
    one = bulk.get(second, one.id)
    one.beat -= 60
    assert one.shown_state == "interrupted"
    one.rate = 0
    bulk.resume(second, one)
    assert ended(second, one.id).state == "done"
    assert [second.broker.get(job_id) for job_id in jobs] == [None] * 12


def test_the_others_follow_only_when_the_first_succeed(mill: Tidemill, anna: Visitor) -> None:
    failed_jobs(mill, 10)
    form = {"act": "retry", "q": "state:failed", "rate": "0", "first": "3"}
    # given jobs that fail again
    bulk_id = started(anna, **form)
    while mill.queue("default").size() < 3:
        pass
    run_all(mill)
    one = ended(mill, bulk_id)
    assert (one.state, one.done) == ("stopped", 3)
    assert "of the first 3 jobs failed again" in one.text
    # and jobs that succeed
    broken.clear()
    bulk_id = started(anna, **form)
    while mill.queue("default").size() < 3:
        pass
    run_all(mill)
    assert ended(mill, bulk_id).done == 10


@pytest.mark.parametrize("form", [{"rate": "-1"}, {"rate": "fast"}, {"first": "9999999"}])
def test_a_bad_number_is_refused(anna: Visitor, form: dict[str, str]) -> None:
    response = anna.post("/bulk", 400, act="retry", q="state:failed", **form)
    assert "must be a whole number" in words(read(response))


def test_jobs_that_match_since_the_start_are_in_the_count(mill: Tidemill, anna: Visitor) -> None:
    failed_jobs(mill, 12)
    bulk_id = started(anna, act="retry", q="task:shop.pay", rate="0", expected="10")
    ended(mill, bulk_id)
    assert "Done 12 of 12 that matched, 2 of them since the start" in words(
        anna.get(f"/bulk/{bulk_id}")
    )
    assert "12 of 12" in words(anna.get("/bulk"))


def test_an_operation_that_goes_on_does_not_count_a_job_twice(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed_jobs(mill, 8)

    def act_and_stop(*args: Any) -> Done:
        done = act(*args)
        [one] = bulk.operations(mill)
        anna.post(f"/bulk/{one.id}/stop")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "act", act_and_stop)
        bulk_id = started(anna, act="retry", q="state:failed", rate="5", expected="8")
        one = ended(mill, bulk_id)
    assert (one.state, one.done) == ("stopped", 5)
    run_all(mill)  # these jobs fail again
    bulk.resume(mill, one)
    one = ended(mill, bulk_id)
    assert (one.state, one.done) == ("done", 8)


def test_the_reasons_of_many_refusals_are_read_together(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = failed_jobs(mill, 30)
    read: list[int] = []
    read_jobs = mill.broker.wait_for

    def wait_for(ids: list[str], timeout: float) -> object:
        read.append(len(ids))
        return read_jobs(ids, timeout)

    monkeypatch.setattr(mill.broker, "wait_for", wait_for)
    assert act(mill, "cancel", failed).reasons == [("it failed already", 30)]
    assert read == [20, 10, 20, 10]  # by the act, and for the reasons


def test_an_operation_tells_how_many_jobs_were_left_and_why(mill: Tidemill, anna: Visitor) -> None:
    failed = failed_jobs(mill, 30)
    broken.clear()
    failed_jobs(mill, 25)  # these succeed
    mill.job(failed[0]).delete()
    mill.job(failed[1]).retry()
    done = act(mill, "retry", [*failed[:3], *(job.id for job in mill.jobs(state="succeeded"))])
    assert (done.done, done.refused) == (1, 27)
    again = "it succeeded already; retry with --force (force=True) runs it again"
    assert done.text("retry") == (
        f"retried 1 job; 27 refused: 25: {again}; 1: it is no longer kept; 1: it is ready"
    )
    # and in the background, where two jobs more have matched
    query = "task:shop.pay state:failed,succeeded"
    bulk_id = started(anna, act="retry", q=query, rate="0", expected="54")
    one = ended(mill, bulk_id)
    assert (one.state, one.done, one.refused) == ("done", 27, 25)
    for _ in range(2):  # also after a reload
        text = words(anna.get(f"/bulk/{bulk_id}"))
        assert "Done 27 of 54 that matched at the start" in text
        assert f"Left 27 25: {again} 2: changed before the operation reached them" in text


def test_an_operation_that_runs_tells_what_it_has_not_reached(
    mill: Tidemill, anna: Visitor
) -> None:
    failed_jobs(mill, 8)
    bulk_id = started(anna, act="retry", q="task:shop.pay", rate="1", expected="8")
    anna.post(f"/bulk/{bulk_id}/stop")
    one = ended(mill, bulk_id)
    left = 8 - one.done
    assert f"Left {left} {left}: not reached yet" in words(anna.get(f"/bulk/{bulk_id}"))


def test_a_search_is_shown_as_the_user_typed_it(mill: Tidemill, anna: Visitor) -> None:
    failed_jobs(mill, 3)
    assert GROUP not in words(anna.get("/bulk/new?act=retry&q=task:shop.pay"))
    bulk_id = started(anna, act="retry", q="task:shop.pay", rate="0", expected="3")
    ended(mill, bulk_id)
    for path in (f"/bulk/{bulk_id}", "/bulk", "/audit"):
        text = words(anna.get(path))
        assert "task:shop.pay state:failed" in text
        assert GROUP not in text


def test_a_runner_that_was_silent_does_not_run_beside_another(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a runner that halts just before it looks whether it may go on
    failed_jobs(mill, 8)
    halted, goes_on = threading.Event(), threading.Event()

    def halt(*args: Any) -> None:
        monkeypatch.setattr(bulk._Runner, "_go_on", look)
        halted.set()
        assert goes_on.wait(60)
        look(*args)

    look = bulk._Runner._go_on
    monkeypatch.setattr(bulk._Runner, "_go_on", halt)
    bulk_id = started(anna, act="retry", q="state:failed", rate="0", expected="8")
    assert halted.wait(60)
    [silent] = [thread for thread in threading.enumerate() if thread.name.startswith("bulk-")]
    # and another runner that has retried all jobs, which failed again
    one = bulk.get(mill, bulk_id)
    one.beat -= 60
    bulk.resume(mill, one)
    for thread in threading.enumerate():
        if thread.name.startswith("bulk-") and thread is not silent:
            thread.join(60)
    run_all(mill)
    # when the first runner comes back
    goes_on.set()
    silent.join(60)
    # then
    assert states(mill) == {State.FAILED}
    one = bulk.get(mill, bulk_id)
    assert (one.state, one.done, one.refused) == ("done", 8, 0)
    assert [note.what for note in notes(mill.broker)] == [
        "finished bulk retry",
        "started bulk retry",
    ]


def test_of_two_users_one_resumes(mill: Tidemill, anna: Visitor) -> None:
    failed_jobs(mill, 3)
    bulk_id = started(anna, act="retry", q="state:failed", rate="1", expected="3")
    anna.post(f"/bulk/{bulk_id}/stop")
    ended(mill, bulk_id)
    first, second = bulk.get(mill, bulk_id), bulk.get(mill, bulk_id)
    bulk.resume(mill, first)
    for change in (bulk.forget, bulk.resume):
        with pytest.raises(InvalidOption, match="somebody else has changed"):
            change(mill, second)
        with pytest.raises(InvalidOption, match=r"stop the operation|nothing to resume"):
            change(mill, bulk.get(mill, bulk_id))
    anna.post(f"/bulk/{bulk_id}/stop")
    ended(mill, bulk_id)


def test_a_failed_act_leaves_its_place(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = failed_jobs(mill, 3)

    def fail(*_: Any) -> Done:
        raise BrokerUnavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(bulk, "act", fail)
        bulk_id = started(anna, act="retry", q="state:failed", rate="20", expected="3")
        one = ended(mill, bulk_id)
    assert (one.state, one.text) == ("failed", "the store is away")
    bulk.resume(mill, one)
    one = ended(mill, bulk_id)
    assert (one.state, one.done) == ("done", len(ids))


# -- the restore of a purge ------------------------------------------------------------------------


def purged(mill: Tidemill, count: int) -> str:
    """The id of a purge of so many messages."""
    mill.queue("mail").put_many([str(n) for n in range(count)])
    mill.queue("mail").purge()
    return mill.queue("mail").purges()[0].id


def restored(anna: Visitor, purge_id: str) -> str:
    """The id of the operation that restores a purge."""
    location: str = anna.post("/queues/mail/restore", purge=purge_id).headers["location"]
    assert location.startswith("/bulk/")
    return location.removeprefix("/bulk/")


def test_a_large_purge_is_restored_in_the_background(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given more purged jobs than one request restores
    monkeypatch.setattr(queues, "_RESTORED_AT_ONCE", 599)
    purge_id = purged(mill, 600)
    # when
    one = ended(mill, restored(anna, purge_id))
    # then all jobs are back, the page tells so, and the purge is off the list
    assert (one.state, one.done, one.refused, one.expected) == ("done", 600, 0, 600)
    assert mill.queue("mail").size() == 600
    assert mill.queue("mail").purges() == []
    assert "Restore a purge done" in words(anna.get(f"/bulk/{one.id}"))
    assert "Restore a purge done" in words(anna.get("/bulk"))
    found = [(note.what, note.count) for note in notes(mill.broker)]
    assert found[:2] == [
        ("finished bulk restore to queue mail", 600),
        ("started bulk restore to queue mail", 600),
    ]


def test_an_interrupted_restore_goes_on_where_it_stopped(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a restore whose process ends after the first piece
    def end_after_a_piece(runner: bulk._Runner, seconds: float = 0.0) -> None:
        if runner._bulk.done:
            raise bulk._LeftError

    monkeypatch.setattr(queues, "_RESTORED_AT_ONCE", 599)
    purge_id = purged(mill, 600)
    monkeypatch.setattr(bulk._Runner, "_go_on", end_after_a_piece)
    one = ended(mill, restored(anna, purge_id))
    assert (one.state, one.done) == ("running", 500)
    monkeypatch.undo()
    monkeypatch.setattr(bulk.Bulk, "shown_state", "interrupted")
    # when somebody resumes the restore
    anna.act(f"/bulk/{one.id}/resume")
    # then the other jobs are back, too, each once
    monkeypatch.undo()
    one = ended(mill, one.id)
    assert (one.state, one.done, one.refused) == ("done", 600, 0)
    assert mill.queue("mail").size() == 600
