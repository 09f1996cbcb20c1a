"""``explain``: one sentence on why a job is where it is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tidemill import Limit, Retries, Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.client import explain
from tidemill.client.explain import explain_in
from tidemill.core.job import Lease, Note, Outcome, Owner, Verdict
from tidemill.core.scoreboard import Scoreboard

CLOCK = r"\d\d:\d\d:\d\d"


def told(mill: Tidemill, job_id: str) -> str:
    return explain_in(mill.broker, mill.job(job_id).refresh())


def take(mill: Tidemill, owner: str, **fields: object) -> Lease:
    """Attach an owner on this process, and lease a job."""
    mill.broker.attach(Owner(id=owner, name=owner, pid=os.getpid(), host="here", **fields))  # type: ignore[arg-type]
    [lease] = mill.broker.exchange(Step(owner, want=Want(1))).leases
    return lease


@pytest.fixture
def board(tmp_path: Path) -> Scoreboard:
    """A scoreboard with one share, of process 4711."""
    board = Scoreboard(str(tmp_path / "board"), 4)
    board.claim("w1")
    board.sign(0, 4711, 0.0)
    return board


def test_a_running_job_is_explained_by_its_process(mill: Tidemill, board: Scoreboard) -> None:
    # given a job that a worker has leased
    @mill.task(retries=3)
    def work() -> None: ...

    job = work.enqueue()
    lease = take(mill, "w1", board=board.path)
    assert re.fullmatch(
        rf"It was leased by w1 at {CLOCK}, attempt 1 of 4, and waits there for a slot",
        told(mill, job.id),
    )
    # when its run starts and reports progress
    board.start(1, lease.token, 0, 1_000_000.0, 0.0)
    mill.broker.exchange(Step("w1", notes=[Note(lease.token, done=11, total=20, text="b.png")]))
    # then the sentence says where it runs and how far it is
    assert re.fullmatch(
        rf"It has run since 1970-01-1\d {CLOCK} in process 4711 on host here, attempt 1 of 4, "
        r"11 of 20 done \(b\.png\)",
        told(mill, job.id),
    )


def test_a_dead_worker_is_named(mill: Tidemill, monkeypatch: pytest.MonkeyPatch) -> None:
    @mill.task
    def work() -> None: ...

    job = work.enqueue()
    take(mill, "w1")
    assert " and waits there" not in told(mill, job.id)  # without a scoreboard nobody knows
    monkeypatch.setattr(mill.broker, "owners", list)
    assert told(mill, job.id) == "It was leased by w1, which is gone: start a worker"
    monkeypatch.setattr(mill.broker, "owners", lambda: [Owner(id="w2", name="w2")])
    assert told(mill, job.id).endswith("which is gone: another worker takes the job over")


def test_a_backoff_names_its_end(mill: Tidemill) -> None:
    @mill.task(retries=Retries(3, delay=50, jitter=False))
    def work() -> None: ...

    job = work.enqueue()
    lease = take(mill, "w1")
    failed = Verdict(lease.token, Outcome.RETRY, delay=50.0, error="ValueError: no")
    mill.broker.exchange(Step("w1", [failed]))
    assert re.fullmatch(
        rf"It waits until .*{CLOCK}, in (4\d|50) s: attempt 1 of 4 failed \(ValueError: no\)",
        told(mill, job.id),
    )


def test_a_job_behind_others_has_a_place_and_a_time(
    mill: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:  # case M17
    @mill.task(name="api", limit=Limit("20/m", burst=5, concurrency=4, key="acme"))
    def call_api() -> None: ...

    jobs = mill.enqueue_many(call_api.call() for _ in range(100))
    mill.broker.attach(Owner(id="w1", name="w1", pid=os.getpid(), host="here"))
    limit = "the limit of 'api' for key 'acme'"
    # while the limit lets jobs start
    assert told(mill, jobs[-1].id) == (
        f"It is ready, under {limit}, 20/m, burst 5, 4 at a time; 99 jobs are before it, so it "
        "starts in 5 min or later"
    )
    # while the most jobs run
    leases = mill.broker.exchange(Step("w1", want=Want(9))).leases
    assert len(leases) == 4
    assert told(mill, jobs[-1].id) == (
        f"It waits for {limit}: 4 of 4 are running; 95 jobs are before it, so it starts in 5 min "
        "or later"
    )
    # while the bucket is empty
    done = [Verdict(lease.token, Outcome.SUCCESS) for lease in leases]
    mill.broker.exchange(Step("w1", done, want=Want(1)))
    assert told(mill, jobs[-1].id) == (
        f"It waits for {limit}, 20/m, burst 5, 4 at a time; 94 jobs are before it, so it starts in "
        "5 min or later"
    )
    second = "4 at a time; 1 job is before it, so it starts in [3-6] s or later"
    assert re.search(second, told(mill, jobs[6].id))
    assert "4 at a time; the next job may start in" in told(mill, jobs[5].id)
    # and no more than some thousands are counted
    monkeypatch.setattr(explain, "AHEAD_MOST", 20)
    bounded = "; more than 20 jobs are before it, so it starts in 6[0-3] s or later"
    assert re.search(bounded, told(mill, jobs[-1].id))


def test_a_job_without_a_limit_has_a_place(mill: Tidemill) -> None:  # case M17
    @mill.task
    def work() -> None: ...

    jobs = mill.enqueue_many(work.call() for _ in range(3))
    assert told(mill, jobs[2].id) == (
        "It is ready, but no worker serves queue 'default': start one; 2 jobs are before it"
    )
    mill.broker.attach(Owner(id="w1", name="w1", pid=os.getpid(), host="here"))
    waits = "It is ready and waits for a free slot of 1 worker of queue 'default'"
    assert [told(mill, job.id) for job in jobs] == [
        waits,
        f"{waits}; 1 job is before it",
        f"{waits}; 2 jobs are before it",
    ]


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_message_is_explained(mill: Tidemill, attempts: int) -> None:
    # given a message that is put
    mill.broker.attach(Owner(id="c1", kind="consumer", name="c1", pid=os.getpid()))
    message = mill.queue("orders").put("one").id
    assert told(mill, message) == "It is ready for the next consumer of queue 'orders'"
    for number in range(1, attempts + 1):
        # when a consumer holds the message
        step = Step("c1", want=Want(1, tasks=False, messages=True))
        [lease] = mill.broker.exchange(step).leases
        assert re.fullmatch(
            rf"It is held by consumer c1 since .*{CLOCK}, until .*{CLOCK}, in (5\d|60) s, unless "
            "the consumer asks for more time",
            told(mill, message),
        )
        # and gives the message back
        mill.broker.exchange(Step("c1", [Verdict(lease.token, Outcome.RETRY, error="busy")]))
        assert f"attempt {number} of 20 failed (busy)" in told(mill, message)
    again = "is ready for" if attempts == 1 else "waits until"
    assert again in told(mill, message)
