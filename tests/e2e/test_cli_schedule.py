"""``tidemill schedule``, on a real store."""

from __future__ import annotations

import datetime as dt
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_store import Desk

from tidemill.brokers.contract.exchange import Step
from tidemill.core.job import Owner
from tidemill.worker.child_protocol import Hello
from tidemill.worker.scheduling import Scheduling

pytestmark = pytest.mark.everyday


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.syspath_prepend(str(tmp_path))  # restores what --app adds to sys.path
    desk = Desk(tmp_path)
    desk.add.enqueue(1)  # there is a store
    desk.declare()
    yield desk
    desk.close()


def test_one_is_added_listed_paused_resumed_and_removed(desk: Desk) -> None:
    words = ["schedule", "add", "nightly", "add", "1", "--kw", "b=2", "--cron", "0 3 * * *"]
    options = ["--zone", "Europe/Berlin", "--queue", "q", "--key", "k", "--repeats", "3"]
    added = desk.run(*words, *options, "--app", desk.write_app(), url=False)
    assert added.exit_code == 0, added.output
    assert added.stdout.startswith("nightly fires next at 20")
    assert "03:00:00+0" in added.stdout
    (row,) = desk.json("schedule", "list")["schedules"]
    assert (row["name"], row["task"], row["queue"]) == ("nightly", "add", "q")
    assert (row["arguments"], row["when"]) == ("1, b=2", "0 3 * * * Europe/Berlin")
    assert (row["repeats"], row["fired"], row["known"]) == (3, 0, None)
    assert row["next"] > time.time()
    listed = desk.run("schedule", "list").stdout
    assert "nightly" in listed
    assert "3 left" in listed
    assert desk.run("schedule", "pause", "nightly").stdout == "nightly is paused\n"
    assert "paused" in desk.run("schedule", "list").stdout
    assert desk.run("schedule", "next", "nightly").stdout == ""
    assert "fires next at" in desk.run("schedule", "resume", "nightly").stdout
    assert len(desk.json("schedule", "next", "nightly", "-n", "9")["next"]) == 3
    assert desk.run("schedule", "remove", "nightly").stdout == "nightly is removed\n"
    assert "no schedules in" in desk.run("schedule", "list").stdout


def test_a_task_the_app_does_not_have_says_so(desk: Desk) -> None:
    app = desk.write_app()
    words = ["schedule", "add", "s", "nothing", "--every", "60"]
    refused = desk.run(*words, "--app", app, url=False)
    assert refused.exit_code == 2
    assert "'nothing' is no task of this app" in refused.stderr
    assert "no worker on lmdb://" in desk.run(*words).stderr
    assert desk.run(*words, "--queue", "q").exit_code == 0  # who names the queue knows it
    listed = desk.run("schedule", "list", "--app", app, url=False)
    assert "unknown task" in listed.stdout
    doctor = desk.run("doctor", "--app", app, url=False).stdout
    assert "1 of 1 name a task that neither this app nor a worker has: s (nothing)" in doctor
    document = desk.run("schedule", "list", "--app", app, "--json", url=False).stdout
    assert json.loads(document)["schedules"][0]["known"] is False


def test_a_schedule_that_no_living_worker_declares_says_so(desk: Desk) -> None:
    desk.mill.schedule("s", desk.mill.call("add", 1), every=0.05)
    declared = Hello(schedules=desk.mill.runtime.code_schedules.bodies())
    for owner in ("gone", "here"):
        desk.mill.broker.attach(Owner(id=owner, name=owner))
        Scheduling("app", owner).declare(desk.mill.broker, declared)
        declared = Hello(schedules=[("other", declared.schedules[0][1])])
    desk.mill.schedules.pause("other")
    desk.mill.broker.detach("gone")
    assert "no worker declares it" in desk.run("schedule", "list").stdout
    while not (due := desk.mill.broker.exchange(Step("here", fires=5)).schedules):
        desk.mill.broker.wait("here", 0.05)
    shown = desk.run("schedule", "next", "s", "-n", "1").stdout
    assert shown.endswith("  past: a worker puts its job at once\n")
    Scheduling("app", "here").fire(desk.mill.broker, due)
    assert "not declared since 20" in desk.run("schedule", "list").stdout
    (row,) = [r for r in desk.json("schedule", "list")["schedules"] if r["name"] == "s"]
    assert (row["declared"], row["next"]) == (False, None)
    assert row["undeclared"] == pytest.approx(time.time(), abs=600)
    assert "1 of 2 do not fire, since no worker declares them" in desk.run("doctor").stdout
    assert desk.run("schedule", "remove", "s").stdout == "s is removed\n"
    removed = desk.run("schedule", "remove", "other").stdout
    assert removed == "other is removed, until a worker starts\n"


def test_mistakes_say_what_is_wrong(desk: Desk) -> None:  # case C8
    add = ["schedule", "add", "s", "add", "1"]
    for options, sentence in (
        (["--cron", "0 25 * * *"], "its hour '25' is wrong; it goes from 0 to 23"),
        (["--cron", "0 3 * * *", "--every", "5"], "not both cron= and every="),
        ([], "takes one of cron=, every= and at="),
        (["--every", "eon"], "every 'eon' is no interval"),
        (["--at", "noon"], "'noon' is no time"),
        (["--at", "2020-01-01T00:00"], "would never fire: its time is past"),
        (["--every", "60", "--zone", "Mars"], "zone 'Mars' is no time zone"),
    ):
        result = desk.run(*add, *options)
        assert result.exit_code == 2, (options, result.output)
        assert sentence in result.stderr
    assert desk.run(*add, "--every", "60").exit_code == 0
    again = desk.run(*add, "--every", "90")
    assert again.exit_code == 1
    assert "there is a schedule 's' already; remove it first" in again.stderr
    for verb in ("pause", "resume", "remove", "run", "next"):
        missing = desk.run("schedule", verb, "nobody")
        assert missing.exit_code == 1
        assert "there is no schedule 'nobody'" in missing.stderr


def test_times_are_previewed_without_a_schedule(desk: Desk) -> None:  # case C6
    words = ["--every", "month", "--start", "2099-01-31T09:00", "--zone", "Europe/Berlin"]
    shown = desk.run("schedule", "next", *words, "-n", "3", url=False)  # there need be no store
    assert shown.stdout.splitlines() == [
        "2099-01-31 09:00:00+01:00",
        "2099-02-28 09:00:00+01:00",
        "2099-03-31 09:00:00+02:00",
    ]
    assert "give the NAME of a schedule, or options" in desk.run("schedule", "next").stderr


def test_run_puts_its_job_and_the_job_tells_of_it(desk: Desk) -> None:
    assert desk.run("schedule", "add", "s", "add", "1", "--every", "hour").exit_code == 0
    job_id = desk.run("schedule", "run", "s").stdout.strip()
    desk.work()
    assert desk.mill.job(job_id).result(5) == 2
    page = desk.run("job", job_id).stdout
    assert "schedule  s, for 20" in page
    document = desk.json("job", job_id)
    assert document["schedule"] == "s"
    assert document["planned"] == pytest.approx(time.time(), abs=600)


def test_several_at_a_time_or_none(desk: Desk) -> None:
    for name in ("a", "b"):
        assert desk.run("schedule", "add", name, "add", "1", "--every", "hour").exit_code == 0
    assert desk.run("schedule", "pause", "a", "nobody").exit_code == 1
    assert not any(row["paused"] for row in desk.json("schedule", "list")["schedules"])
    paused = desk.json("schedule", "pause", "a", "b")["schedules"]
    assert [(row["name"], row["paused"]) for row in paused] == [("a", True), ("b", True)]
    assert [r["paused"] for r in desk.json("schedule", "resume", "a")["schedules"]] == [False]
    assert desk.json("schedule", "remove", "a", "b") == {"removed": ["a", "b"]}
    assert desk.json("schedule", "list") == {"schedules": []}


def test_a_time_without_a_zone_is_utc(desk: Desk) -> None:
    words = ["schedule", "add", "s", "add", "1", "--at", "2099-06-01T12:00", "--json"]
    at = dt.datetime(2099, 6, 1, 12, tzinfo=dt.UTC)
    assert desk.json(*words[:-1])["next"] == at.timestamp()
