"""The command line on RabbitMQ: it shows no number that the server does not know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from harness import Place, eventually, open_place
from servers import rabbitmq_url

from tidemill.core.clock import new_id
from tidemill.core.job import State

APP = """
@mill.task(retries=0)
def fails(n): note("ran", n); raise ValueError(f"broken {n}")

@mill.task
def mends(n): note("ran", n)
"""


CHECKS = {"versions", "broker", "server", "durability", "queues", "backlog", "policies"}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "p"
    folder.mkdir()
    with open_place(folder, f"{rabbitmq_url()}?prefix=t{new_id()[-12:]}") as place:
        place.write(APP)
        yield place


def run(place: Place, *args: str, code: int = 0, **env: str) -> str:
    """What a verb prints on the place's broker."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill", *args, "--url", place.url],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **env},
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + (done.stderr if code else "")


def read(place: Place, *args: str) -> Any:
    return json.loads(run(place, *args, "--json"))


def failed(place: Place, count: int) -> list[Any]:
    """The failed, oldest first, as soon as there are so many."""

    def enough() -> tuple[list[Any]] | None:
        jobs = list(place.mill.jobs(state="failed"))
        return (jobs[::-1],) if len(jobs) == count else None

    return eventually(enough, f"{count} failed")[0]


def listed(place: Place, jobs: list[Any], *args: str) -> list[Any]:
    """The rows of ``tidemill jobs --state failed``, as soon as they are these jobs.

    An earlier look has just given its messages back, and a list without them may come first.
    """
    wanted = [job.id for job in jobs]

    def rows() -> list[Any]:
        found: list[Any] = read(place, "jobs", "--state", "failed", *args)["jobs"]
        return found if [row["id"] for row in found] == wanted else []

    return eventually(rows, f"the failed jobs {wanted}")


def paged(place: Place) -> list[str]:
    """The ids of the failed jobs, as two pages show them."""
    page = read(place, "jobs", "--state", "failed", "--limit", "5")
    if len(page["jobs"]) < 5 or not page["cursor"]:
        return []
    rest = read(place, "jobs", "--state", "failed", "--limit", "20", "--cursor", page["cursor"])
    return [row["id"] for row in page["jobs"] + rest["jobs"]]


def fail_some(place: Place, count: int) -> list[Any]:
    jobs = [place.enqueue("fails", n, queue=f"q{n % 2}") for n in range(count)]
    with_worker = place.worker("-Q", "q0,q1", slots=1)
    found = failed(place, count)
    assert with_worker.stop() == 0
    assert {job.id for job in found} == {job.id for job in jobs}
    return found


def test_queues_shows_what_is_known(place: Place) -> None:
    place.enqueue_many("mends", [(n,) for n in range(3)], queue="a")
    place.enqueue("mends", 9, queue="a", delay=600)
    place.mill.queue("b").put("x", priority=5)
    rows = {row["name"]: row for row in read(place, "queues")["queues"]}
    assert (rows["a"]["ready"], rows["b"]["ready"]) == (3, 1)
    for unknown in ("running", "scheduled", "oldest", "succeeded", "failed", "size"):
        assert rows["a"][unknown] is None
    assert (rows["a"]["waiting"], rows["a"]["consumers"]) == (0, 0)
    line = next(line for line in run(place, "queues").splitlines() if line.startswith("a "))
    assert line.split()[1:5] == ["3", "-", "-", "0"]
    facts = read(place, "info")
    assert (facts["store"]["delayed"], facts["store"]["failed"]) == (1, 0)
    assert (facts["totals"]["ready"], facts["totals"]["running"]) == (4, None)
    assert facts["workers"] is None
    text = run(place, "info")
    assert "no workers" not in text
    assert "delayed   1" in text
    assert "deleted 3 jobs of a" in run(place, "purge", "a", "--yes")
    assert "deleted 1 job of b" in run(place, "purge", "b", "--yes")
    assert run(place, "purge", "c", "--yes", code=1).startswith("tidemill: no queue has the name")


def test_the_doctor_tells_no_lies(place: Place) -> None:
    place.enqueue("mends", 1)
    checks = {check["check"]: check for check in read(place, "doctor")["checks"]}
    assert set(checks) == CHECKS
    assert "1 ready job, and nobody asks" in checks["queues"]["message"]
    place.worker().wait_ready()
    place.wait_notes("ran")
    eventually(
        lambda: {c["status"] for c in read(place, "doctor")["checks"]} == {"ok"}, "all is well"
    )


def test_looking_at_the_failed_keeps_them_and_their_order(place: Place) -> None:
    jobs = fail_some(place, 12)
    shown = listed(place, jobs[::-1])
    assert {row["state"] for row in shown} == {"failed"}
    assert shown[0]["error"].startswith("ValueError: broken")
    assert (shown[0]["attempt"], shown[0]["max_attempts"]) == (1, 1)
    assert abs(shown[0]["finished"] - time.time()) < 60
    eventually(lambda: paged(place) == [job.id for job in jobs[::-1]], "all in two pages")
    of_one = [job for job in jobs[::-1] if job.record.envelope.queue == "q1"]
    assert len(of_one) == 6
    listed(place, of_one, "--queue", "q1")
    assert [job.id for job in failed(place, 12)] == [job.id for job in jobs]
    told = run(place, "explain", jobs[3].id[-8:])
    assert told.strip() == f"It failed: {shown[-4]['error']}"
    assert read(place, "job", jobs[3].id)["error"] == shown[-4]["error"]
    assert "no failed job has the id 'other'" in run(place, "explain", "other", code=1)
    text = run(place, "jobs", code=1)
    assert "looking for jobs that have not failed" in text
    assert "needs the feature inspect, which amqp:// does not have" in text


def test_the_failed_are_tried_again_or_deleted(place: Place) -> None:
    jobs = [job for job in fail_some(place, 8) if job.record.envelope.queue == "q0"]
    assert jobs[0].state is State.FAILED
    assert "broken" in jobs[0].error
    assert jobs[0].retry()
    assert not jobs[0].retry()
    assert jobs[1].delete()
    assert jobs[2].id[-8:] in run(place, "jobs", "--state", "failed")
    assert run(place, "retry", jobs[2].id[-8:]).strip() == "retried 1 job"
    text = run(place, "delete", "unknown", code=1)
    assert "no failed job has this id" in text
    assert run(place, "retry", "--queue", "q1", "--all").strip() == "retried 4 jobs"
    assert [job.id for job in failed(place, 1)] == [jobs[3].id]
    assert run(place, "delete", "--state", "failed", "--all").strip() == "deleted 1 job"
    failed(place, 0)
    place.worker().wait_ready()
    place.wait_notes("ran", 8 + 2 + 4)
    failed(place, 2 + 4)


@pytest.mark.everyday
def test_a_kill_while_retrying_loses_nothing(place: Place) -> None:  # law 3
    jobs = fail_some(place, 6)
    run(place, "retry", "--queue", "q0", "--all", code=-9, TIDEMILL_CRASH="failed.published:1")
    assert [job.id for job in failed(place, 6)] == [job.id for job in jobs]

    def ready() -> int:
        return next(row.ready for row in place.mill.queues() if row.name == "q0")

    eventually(lambda: ready() == 3, "they run, and may be tried once more: at worst twice")


def test_a_listed_failed_job_is_retried_or_refused_with_the_reason(place: Place) -> None:
    # given: a message among the failed that is no job, from nowhere
    fail_some(place, 1)
    prefix = place.url.rpartition("prefix=")[2]
    connection = pika.BlockingConnection(pika.URLParameters(place.url.partition("?")[0]))
    strange = pika.BasicProperties(message_id="strange")
    connection.channel().basic_publish("", f"{prefix}.failed", b"no job", strange)
    connection.close()
    failed(place, 2)
    # then
    assert run(place, "explain", "strange").startswith("It failed: it cannot be read: ")
    text = run(place, "retry", "--all", code=1)
    assert "retried 1 job" in text
    assert "not strange: it is no job, and its queue is unknown; tidemill delete removes" in text
    assert run(place, "delete", "strange").strip() == "deleted 1 job"


def test_top_shows_what_is_known_and_says_what_is_missing(place: Place) -> None:
    place.enqueue_many("mends", [(n,) for n in range(3)], queue="a")
    found = read(place, "top", "--once")
    (row,) = found["queues"]
    assert (row["ready"], row["workers"]) == (3, 0)
    assert row["running"] is None
    assert row["out_per_second"] is None
    assert found["running"] is None
    assert found["workers"] is None
    assert found["missing"] == ["running jobs", "workers", "the ages of jobs", "totals and rates"]
    text = run(place, "top", "--once")
    assert "no consumer" in text
    assert "this broker cannot report running jobs, workers" in text
