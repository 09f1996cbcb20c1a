"""Runs of a job as the command line shows them, and a forced run of a job that succeeded."""

from __future__ import annotations

import pytest
from cli_store import Desk

from tidemill import Key

pytestmark = pytest.mark.everyday


def shown(desk: Desk, job_id: str) -> str:
    return desk.run("job", job_id).stdout


def test_a_retried_job_is_shown_in_its_second_run(desk: Desk) -> None:
    job = desk.bad.enqueue("a thing")
    assert "attempts  none of 2 yet" in shown(desk, job.id)
    desk.work()
    assert "attempts  attempt 2 of 2" in shown(desk, job.id)

    assert desk.run("retry", job.id).exit_code == 0

    assert "attempts  run 2, none of 2 yet" in shown(desk, job.id)
    desk.work()
    out = shown(desk, job.id)
    assert "attempts  run 2, attempt 2 of 2" in out
    place = 0
    parts = [
        *("  attempt 1 of 2", "failed, to be retried", "  attempt 2 of 2"),
        *("failed, no attempts are left", "run 2, attempt 1 of 2", "failed, to be retried"),
        *("run 2, attempt 2 of 2", "failed, no attempts are left"),
    ]
    for part in parts:
        place = out.index(part, place) + len(part)
    document = desk.json("job", job.id)
    assert (document["run"], document["attempt"], document["max_attempts"]) == (2, 2, 2)
    numbers = [(attempt["run"], attempt["number"]) for attempt in document["attempts"]]
    assert numbers == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_the_backoff_of_a_second_run_begins_at_its_first_delay(desk: Desk) -> None:
    from tidemill import Retries

    slow = desk.bad.using(retries=Retries(2, delay=1000, jitter=False))
    job = slow.enqueue("a thing")

    def fail_and_wait() -> float:
        desk.work()
        record = job.refresh()
        return record.due - record.attempts[-1].ended

    assert 990 < fail_and_wait() < 1010
    desk.run("cancel", job.id)
    desk.run("retry", job.id)

    assert 990 < fail_and_wait() < 1010
    explained = desk.run("explain", job.id).stdout
    assert "run 2, attempt 1 of 3 failed (ValueError: cannot do a thing)" in explained


def test_a_job_that_succeeded_is_run_again_only_by_force(desk: Desk) -> None:
    job = desk.add.using(key=Key("k", hold=1000)).enqueue(1)
    desk.work()

    refused = desk.run("retry", job.id)
    assert refused.exit_code == 1
    assert "it succeeded already, and holds its key 'k' for a time" in refused.stderr
    assert "--force" in refused.stderr

    assert desk.run("retry", job.id, "--force").exit_code == 0
    desk.work()
    record = job.refresh()
    assert (str(record.state), record.run, len(record.attempts)) == ("succeeded", 2, 2)
    assert desk.add.using(key=Key("k", hold=1000)).enqueue(2).id == job.id


def test_a_failed_job_whose_key_another_success_holds_names_the_way(desk: Desk) -> None:
    once = Key("k", hold=1000)
    failed = desk.bad.using(retries=0, key=once).enqueue("a thing")
    desk.work()
    desk.add.using(key=once).enqueue(1)
    desk.work()

    refused = desk.run("retry", failed.id)
    assert refused.exit_code == 1
    assert "another job has its key 'k'" in refused.stderr

    assert failed.retry() is False
    assert failed.retry(force=True) is True


def test_the_ttr_of_a_message_is_shown(desk: Desk) -> None:
    orders = desk.mill.queue("orders")
    assert "ttr       60 s" in shown(desk, orders.put("a").id)
    assert "ttr       7.5 s" in shown(desk, orders.put("b", ttr=7.5).id)
    once = orders.put("c", ttr=0)
    assert "ttr       0: handed out at most once" in shown(desk, once.id)
    assert desk.json("job", once.id)["ttr"] == 0
    assert desk.json("job", desk.add.enqueue(1).id)["ttr"] is None
