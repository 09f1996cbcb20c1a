"""Actions on all jobs that match: preview, run, stop, resume after a restart, first a few."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from dashboard_desk import Visitor, read, words

from tidemill import Fail, Tidemill
from tidemill.core.clock import new_id
from tidemill.core.job import State
from tidemill.dashboard import bulk, queues
from tidemill.dashboard.audit import notes
from tidemill.dashboard.bulk import Bulk
from tidemill.dashboard.job_search import parse
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
    assert [(n.what, n.count) for n in reversed(notes(mill))] == [
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
    whats = [note.what for note in notes(mill)]
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
    found = [(note.what, note.count) for note in notes(mill)]
    assert found[:2] == [
        ("finished bulk restore to queue mail", 600),
        ("started bulk restore to queue mail", 600),
    ]
