"""The pages of the overview, queues, workers, audit, settings and help."""

from __future__ import annotations

import html
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from dashboard_desk import Visitor, read, words

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import (
    FAILED,
    HOUR,
    MINUTE,
    RUNS,
    SUCCEEDED,
    WAITS,
    WIDTH,
    HistoryRow,
    bucket_of,
    join_name,
)
from tidemill.brokers.contract.schedules import Schedule
from tidemill.brokers.generic.audit import note, notes
from tidemill.client.worker_reports import Answer, Report
from tidemill.core.job import Command, Outcome, Owner, Verdict
from tidemill.core.scoreboard import Scoreboard
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.look import Looks
from tidemill.dashboard.page import jobs_query


@pytest.fixture
def anna(mill: Tidemill) -> Visitor:
    return Visitor(mill)


def tile(text: str, label: str) -> tuple[str, str]:
    """The value of a tile, and its link."""
    for link, inner in re.findall(
        r'<li><(?:a|div) class="tile[^"]*"(.*?)>(.*?)</li>', text, re.DOTALL
    ):
        if f"{label}</span>" in inner:
            value = re.search(r'class="value">(.*?)</span>', inner, re.DOTALL)
            href = re.search(r'href="([^"]*)"', link)
            assert value
            return html.unescape(value[1].strip()), html.unescape(href[1]) if href else ""
    raise AssertionError(f"no tile {label}")


def attach(mill: Tidemill, **what: Any) -> Owner:
    owner = Owner(id="w1", name="box:1", host="box", pid=1, concurrency=4, **what)
    mill.broker.attach(owner)
    return owner


# -- overview --------------------------------------------------------------------------------------


def test_the_overview_counts_jobs_by_state_and_links_to_their_lists(
    mill: Tidemill, anna: Visitor
) -> None:
    mill.queue("mail").put("a")
    mill.queue("mail").put("b")
    mill.queue("mail").put("c", delay=1000)
    text = anna.get("/")
    assert tile(text, "Ready") == ("2", "/jobs?q=state%3Aready")
    assert tile(text, "Scheduled") == ("1", "/jobs?q=state%3Ascheduled")
    assert tile(text, "Oldest ready")[1] == "/queues/mail"


def test_the_overview_of_an_empty_store_shows_the_first_two_commands(mill: Tidemill) -> None:
    mill.task(name="send", queue="mail")(print)
    anna = Visitor(Dashboard(mill, app="shop:mill"))
    shown = words(anna.get("/"))
    assert "Make the first job: tidemill enqueue --app shop:mill send" in shown
    assert "Start the first worker: tidemill worker shop:mill" in shown
    mill.queue("mail").put("a")
    look_again(anna)
    assert "first job" not in words(anna.get("/"))


def test_the_overview_shows_what_ran_and_what_failed(mill: Tidemill, anna: Visitor) -> None:
    keep_runs(mill, "mail", "send", succeeded=90, failed=10)
    text = anna.get("/")
    shown = words(text)
    assert "send 10 0 10 %" in shown  # failed, retried, of attempts
    assert "send 100" in shown
    assert "state%3Afailed+task%3Asend" in text
    chart = json.loads(html.unescape(re.search(r'data-chart="([^"]*)"', text)[1]))  # type: ignore[index]
    assert [line["name"] for line in chart["lines"]] == ["succeeded", "failed", "retried"]
    assert 90 in [value and round(value) for value in chart["lines"][0]["values"]]


def keep_runs(
    mill: Tidemill, queue: str, task: str, *, succeeded: int, failed: int, span: int = MINUTE
) -> None:
    counts = [0] * WIDTH
    counts[SUCCEEDED], counts[FAILED] = succeeded, failed
    counts[RUNS.start + bucket_of(0.1)] = counts[WAITS.start + bucket_of(3)] = succeeded + failed
    name, at = join_name(queue, task, ""), int(time.time()) // span * span - span
    with_history(mill.broker, "a test").keep_history(
        [HistoryRow("task", name, span, at, tuple(counts))]
    )


def test_a_queue_with_jobs_and_no_worker_is_a_banner_with_the_command(
    mill: Tidemill, anna: Visitor
) -> None:
    mill.task(name="send", queue="mail")(print).enqueue()
    banner = "Queue mail has 1 ready job and no worker. tidemill worker MODULE:VAR -Q mail"
    assert banner in words(anna.get("/"))
    attach(mill, queues=("mail",))
    look_again(anna)
    assert "no worker" not in words(anna.get("/"))


@pytest.mark.parametrize(
    ("tasks", "messages", "paused", "banner", "not_said"),
    [
        (
            ("mail", "images"), (), False,
            "No worker is alive, and 2 unfinished jobs of 2 queues wait. tidemill worker MODULE",
            "and no worker",
        ),
        ((), ("mail",), False, "", "no worker"),
        (
            ("mail",), (), True,
            "Queue mail is paused with 1 ready job, and has no worker. tidemill resume mail",
            "Queue mail has",
        ),
        (
            (), ("mail",), True,
            "Queue mail is paused with 1 ready job. tidemill resume mail",
            "no worker",
        ),
    ],
    ids=["many queues", "messages", "paused", "paused messages"],
)  # fmt: skip
def test_a_problem_is_one_banner(
    mill: Tidemill,
    anna: Visitor,
    tasks: tuple[str, ...],
    messages: tuple[str, ...],
    paused: bool,
    banner: str,
    not_said: str,
) -> None:
    for queue in tasks:
        mill.task(name=f"of.{queue}", queue=queue)(print).enqueue()
    for queue in messages:
        mill.queue(queue).put("a")
    if paused:
        mill.broker.set_queue("mail", paused=True)
    shown = words(anna.get("/"))
    assert shown.count(banner) == 1 or not banner
    assert not_said not in shown


def test_jobs_of_a_worker_that_is_gone_are_a_banner(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = attach(mill)
    mill.queue("mail").put("a")
    lease(mill, owner, "mail")
    assert "that are gone" not in words(anna.get("/"))
    monkeypatch.setattr(mill.broker, "owners", list)  # as on a store whose owner just died
    look_again(anna)
    assert "1 running job held by a worker that is gone" in words(anna.get("/"))


def test_a_run_is_marked_when_it_takes_longer_than_nearly_all_runs_of_its_task(
    mill: Tidemill, anna: Visitor, tmp_path: Path
) -> None:
    keep_runs(mill, "mail", "send", succeeded=100, failed=0, span=HOUR)  # of 0.1 s
    send = mill.task(name="send", queue="mail")(print)
    mill.task(name="rare", queue="mail")(print).enqueue()
    slow, usual = send.enqueue(), send.enqueue()
    board = Scoreboard(str(tmp_path / "board"), 4)
    board.claim("w1")
    board.sign(0, 4711, 0.0)
    attach(mill, board=board.path)
    leases = mill.broker.exchange(Step("w1", want=Want(3))).leases
    now = time.time()
    for slot, (lease, started) in enumerate(zip(leases, (now - 9, now - 9, now + 60), strict=True)):
        board.start(slot + 1, lease.token, 0, started, 0.0)
    # then the job of a task with few runs has no mark, either
    marked = '99 % of the runs of this task in the last day took at most 128 ms"'
    assert anna.get("/workers").count(marked) == 1
    assert re.search(rf'id="row-{slow.id}".*?over p99', anna.get("/jobs"), re.DOTALL)
    assert marked in anna.get(f"/jobs/{slow.id}").partition("</h1>")[0]
    assert marked not in anna.get(f"/jobs/{usual.id}").partition("</h1>")[0]


def look_again(visitor: Visitor) -> None:
    """Forget what viewers share for some seconds."""
    visitor.dashboard.looks.forget()
    visitor.dashboard.cache.clear()


def lease(mill: Tidemill, owner: Owner, queue: str) -> int:
    """Lease the first message of a queue; the token of the lease."""
    want = Want(count=1, queues=(queue,), tasks=False, messages=True)
    [found] = mill.broker.exchange(Step(owner.id, want=want)).leases
    return found.token


# -- queues ----------------------------------------------------------------------------------------


def test_queues_are_listed_with_their_numbers_fullest_first(mill: Tidemill, anna: Visitor) -> None:
    mill.queue("few").put("a")
    for number in range(3):
        mill.queue("many").put(number)
    text = anna.get("/queues")
    assert text.index("/queues/many") < text.index("/queues/few")
    assert 'href="/jobs?q=state%3Aready+queue%3Amany">3</a>' in text
    by_name = anna.get("/queues?sort=name")
    assert by_name.index("/queues/few") < by_name.index("/queues/many")
    assert "/queues/few" not in anna.get("/queues?name=AN")


def test_a_queue_is_paused_and_goes_on(mill: Tidemill, anna: Visitor) -> None:
    mill.queue("mail").put("a")
    anna.act("/queues/mail/pause")
    assert [row.paused for row in mill.queues()] == [True]
    assert anna.act("/queues/mail/resume") == "ok: Queue mail goes on."
    assert [row.paused for row in mill.queues()] == [False]


def test_all_queues_are_paused_and_resumed(mill: Tidemill, anna: Visitor) -> None:
    for queue in ("mail", "images", "orders"):
        mill.queue(queue).put("a")
    mill.broker.set_queue("orders", paused=True)
    assert 'data-ask="Pause 2 queues?' in anna.get("/queues?name=mail")
    # when
    said = anna.act("/queues/pause")
    # then
    assert said == "ok: 2 queues paused: running jobs go on, no other job starts."
    assert all(row.paused for row in mill.queues())
    assert 'data-ask="Pause' not in anna.get("/queues")
    assert anna.act("/queues/resume") == "ok: 3 queues resumed."
    assert not any(row.paused for row in mill.queues())
    found = [(note.what, set(note.target.split(", ")), note.count) for note in notes(mill.broker)]
    assert found == [
        ("resumed all queues", {"mail", "images", "orders"}, 3),
        ("paused all queues", {"mail", "images"}, 2),
    ]


def test_the_limits_of_a_queue_are_changed(mill: Tidemill, anna: Visitor) -> None:
    mill.queue("mail").put("a")
    anna.act("/queues/mail/bounds", rate="10/m", concurrency="3", max_size="100")
    shown = words(anna.get("/queues/mail"))
    assert "Limits 10/m, burst 1, 3 at a time (changed by hand)" in shown
    assert "Most jobs 100" in shown
    anna.act("/queues/mail/bounds", rate="", concurrency="3", max_size="")
    shown = words(anna.get("/queues/mail"))
    assert "Limits 3 at a time" in shown
    assert "Most jobs no bound" in shown
    anna.act("/queues/mail/declared")
    assert "Limits none" in words(anna.get("/queues/mail"))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("rate", "fast", "error: rate must be jobs per time"),
        ("concurrency", "-1", "error: concurrency must be a whole number"),
        ("max_size", "9" * 30, "error: the most jobs must be a whole number"),
    ],
)
def test_a_wrong_limit_is_refused(
    mill: Tidemill, anna: Visitor, field: str, value: str, says: str
) -> None:
    mill.queue("mail").put("a")
    said = anna.act("/queues/mail/bounds", **{field: value, "back": "/queues"})
    assert said.startswith(says)


def test_a_queue_shows_its_rates_and_how_long_until_it_is_empty(
    mill: Tidemill, anna: Visitor
) -> None:
    owner = attach(mill)
    for number in range(6):
        mill.queue("mail").put(number)
    history = with_history(mill.broker, "a test")
    now = int(time.time()) // MINUTE * MINUTE
    empty = (0,) * 12
    history.keep_history(
        [HistoryRow("queue", name, MINUTE, now - 2 * MINUTE, empty) for name in ("mail", "\x1f")]
    )
    for _ in range(3):
        token = lease(mill, owner, "mail")
        mill.broker.exchange(Step(owner.id, [Verdict(token, Outcome.SUCCESS)]))
    text = anna.get("/queues/mail")
    assert tile(text, "Ready")[0] == "3"
    assert tile(text, "In")[0] != "0/s"
    assert tile(text, "Empty in")[0] == "never"
    assert "the queue grows" in text


# -- workers ---------------------------------------------------------------------------------------


def test_workers_are_listed_by_host_with_what_they_run(mill: Tidemill, anna: Visitor) -> None:
    owner = attach(mill, queues=("mail",), started=time.time() - 7200)
    job = mill.queue("mail").put("a")
    mill.queue("mail").put("b")
    lease(mill, owner, "mail")
    text = anna.get("/workers")
    shown = words(text)
    assert "box:1 queues mail; pid 1; up 2 h" in shown
    assert "1 of 4 slots busy" in shown
    assert f'href="/jobs/{job.id}"' in text
    assert "No worker takes from queue other" in words(anna.get("/workers?queue=other"))


@pytest.mark.parametrize("verb", ["quiet", "stop"])
def test_a_worker_gets_a_command(mill: Tidemill, anna: Visitor, verb: str) -> None:
    owner = attach(mill)
    assert anna.act(f"/workers/{owner.id}/{verb}").startswith("ok: Worker box:1 was asked")
    assert mill.broker.exchange(Step(owner.id)).commands == [Command(verb)]
    anna.post(f"/workers/{owner.id}/explode", 404)
    assert anna.act(f"/workers/gone/{verb}", back="/workers") == "error: that worker is gone"


def test_the_stacks_and_the_profile_of_a_worker_are_shown(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a worker that answers
    owner = attach(mill)
    asked: list[tuple[object, ...]] = []

    def answer(broker: object, worker: Owner, verb: str, *numbers: float) -> Report:
        asked.append((worker.id, verb, *numbers))
        answers = [Answer("q", 77, "<File> shop.py", {"main;send": 9}, 10)]
        return Report(worker.name, verb, answers, [78])

    monkeypatch.setattr("tidemill.dashboard.workers.ask_worker", answer)
    # when somebody asks for its stacks, and for a profile
    stacks = read(anna.post(f"/workers/{owner.id}/dump", 200))
    profile = anna.post(f"/workers/{owner.id}/profile", 200, seconds="3")
    # then both come, the profile as a file that the policy of the dashboard does not concern
    assert "&lt;File&gt; shop.py" in stacks
    assert "Process 78 does not answer." in words(stacks)
    assert profile.headers["content-disposition"] == 'attachment; filename="profile-box-1.html"'
    assert b"send" in bytes(profile.body)
    assert asked == [(owner.id, "dump"), (owner.id, "profile", 3.0, 100.0)]
    for wrong in ("0", "61", "1e9", "x"):
        anna.post(f"/workers/{owner.id}/profile", 400, seconds=wrong)


# -- audit, settings, help -------------------------------------------------------------------------


def test_each_action_is_in_the_audit_list(mill: Tidemill, anna: Visitor) -> None:
    mill.queue("mail").put("a")
    anna.act("/queues/mail/pause")
    anna.act("/queues/mail/purge", confirm="mail")
    anna.act("/queues/mail/purge", confirm="wrong", back="/queues")  # no action
    found = [(note.who, note.what, note.target, note.count) for note in notes(mill.broker)]
    assert found == [("anna", "purged queue", "mail", 1), ("anna", "paused queue", "mail", 1)]
    assert "anna purged queue mail 1" in words(anna.get("/audit"))
    assert "paused" not in words(anna.get("/audit?what=purge"))
    assert "purged" not in words(anna.get("/audit?who=berta"))


def test_a_purge_is_restored_from_the_page_of_its_queue(mill: Tidemill, anna: Visitor) -> None:
    mill.queue("mail").put_many(["a", "b"])
    assert "Purges" not in anna.get("/queues/mail")
    assert "They can be restored for a while." in anna.get("/queues/mail")
    anna.act("/queues/mail/purge", confirm="mail")
    # then the page shows the purge, and its button brings the jobs back
    text = anna.get("/queues/mail")
    (purge,) = mill.queue("mail").purges()
    assert 'action="/queues/mail/restore"' in text
    assert f'name="purge" value="{purge.id}"' in text
    said = anna.act("/queues/mail/restore", purge=purge.id)
    assert said == "ok: 2 jobs were restored to queue mail."
    assert mill.queue("mail").size() == 2
    assert "Purges" not in anna.get("/queues/mail")
    found = [(note.what, note.target, note.count) for note in notes(mill.broker)]
    assert found == [("restored queue", "mail", 2), ("purged queue", "mail", 2)]
    # and a purge for good is not listed
    said = anna.act("/queues/mail/purge", confirm="mail", now="1")
    assert said == "ok: 2 jobs were deleted from queue mail. They cannot be restored."
    assert mill.queue("mail").purges() == []


def test_the_audit_list_goes_on_with_older_actions(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.dashboard.audit._PAGE", 3)
    mill.queue("mail").put("a")
    for _ in range(4):
        anna.post("/queues/mail/pause")
    text = anna.get("/audit")
    more = re.search(r'href="(/audit\?before=[^"]*)"', text)
    assert more
    assert text.count("paused queue") == 3
    assert anna.get(html.unescape(more[1])).count("paused queue") == 1


def test_a_page_of_the_audit_list_reads_no_further_entries(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.brokers.generic.notes._PAGE", 10)
    for number in range(300):
        note(mill.broker, "anna", "paused queue", f"queue-{number}")
    read: list[Schedule] = []
    listed = mill.broker.list_schedules

    def list_schedules(after: str, limit: int) -> list[Schedule]:
        read.extend(found := listed(after, limit))
        return found

    monkeypatch.setattr(mill.broker, "list_schedules", list_schedules)
    text = anna.get("/audit")
    assert ("queue-299" in text, "queue-200" in text, "queue-199" in text) == (True, True, False)
    assert len(read) == 110  # a page of 100, and the one that says that there are more
    assert "queue-7<" in anna.get("/audit?what=queue-7")


# -- parts -----------------------------------------------------------------------------------------


def test_a_filter_is_quoted_where_it_has_spaces_or_quotes() -> None:
    assert jobs_query(state="failed", queue="mail", task="", ended=None) == (
        "state:failed queue:mail"
    )
    assert jobs_query(args='a "b"\\') == 'args:"a \\"b\\"\\\\"'


def test_viewers_share_one_look_at_the_store(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    stats = mill.broker.stats
    monkeypatch.setattr(mill.broker, "stats", lambda: looks.append(1) or stats())  # type: ignore[func-returns-value]
    other = Visitor(anna.dashboard)
    monkeypatch.setattr(Looks.take, "__defaults__", (60.0,))  # a busy machine is slow
    anna.get("/workers")
    other.get("/workers")
    assert len(looks) == 1
