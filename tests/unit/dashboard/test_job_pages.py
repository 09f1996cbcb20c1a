"""The pages of jobs: the list, one job, actions, exports, and running a job again with edits."""

from __future__ import annotations

import datetime as dt
import html
import json
import re
from typing import Any

import pytest
from dashboard_desk import Visitor, read, words

from tidemill import Fail, InvalidOption, Limit, Tidemill, group, this_job
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.generic.audit import notes
from tidemill.client.explain import explain_in
from tidemill.core.job import Outcome, Owner, State, Verdict
from tidemill.dashboard.dashboard import Dashboard
from tidemill.dashboard.formats import frames
from tidemill.dashboard.job import RERUN_OF
from tidemill.dashboard.roles import Role, User
from tidemill.testing import run_all

HOSTILE = '<img src=x onerror="alert(1)">'
VIEWER = User("vera", Role.VIEWER)


@pytest.fixture
def anna(mill: Tidemill) -> Visitor:
    @mill.task(name="shop.pay", retries=0)
    def pay(order: int, note: str = "") -> int:
        this_job().log(f"pays {order}")
        this_job().progress(1, 2, f"asks the bank {note}")
        if order < 0:
            raise Fail(f"no order {order}")
        return order * 2

    return Visitor(mill)


def pay(mill: Tidemill, *orders: int, **options: Any) -> list[str]:
    calls = [mill.tasks["shop.pay"].call(order).using(**options) for order in orders]
    return [job.id for job in mill.enqueue_many(calls)]


def listed(text: str) -> list[str]:
    """The ids of the jobs of a list, in order."""
    return re.findall(r'name="id" value="([^"]+)"', text)


# -- the list --------------------------------------------------------------------------------------


def test_the_list_is_newest_first_and_goes_on_with_a_cursor(mill: Tidemill, anna: Visitor) -> None:
    ids = pay(mill, *range(60))
    first = anna.get("/jobs?size=50")
    assert listed(first) == ids[::-1][:50]
    assert "60" in words(first)
    older = re.search(r'rel="next" href="([^"]+)"', first)
    assert older
    assert listed(anna.get(html.unescape(older[1]))) == ids[::-1][50:]


def test_state_and_task_are_searched_together(mill: Tidemill, anna: Visitor) -> None:
    ids = pay(mill, -1, 2)
    mill.queue("other").put("x")
    run_all(mill)
    text = anna.get("/jobs?q=state:failed+task:shop.pay")
    assert listed(text) == ids[:1]
    assert "1 matches" in words(text)
    assert "no order -1" in words(text)
    assert "No job matches" in anna.get("/jobs?q=state:failed+task:other")


def test_a_bad_search_gets_a_sentence_on_the_page(anna: Visitor) -> None:
    assert "state:broken is no state" in words(anna.get("/jobs?q=state:broken"))


@pytest.mark.parametrize("part", [slice(None), slice(0, 20), slice(-8, None)])
def test_an_id_or_a_part_of_it_opens_the_job(mill: Tidemill, anna: Visitor, part: slice) -> None:
    job_id = pay(mill, 1)[0]
    assert anna.send("GET", f"/jobs?q={job_id[part]}").headers["location"] == f"/jobs/{job_id}"


def test_a_look_that_stopped_early_does_not_say_none(  # case M17
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a flow, and a job of a schedule, before many other jobs of the same task
    put = mill.enqueue(group([mill.call("shop.old", 1).using(queue="default")] * 2))
    call = mill.call("shop.pay", 1).using(queue="default")
    mill.schedules.add("nightly", call, cron="0 3 * * *")
    of_schedule = mill.schedules.run("nightly").id
    pay(mill, *range(40))
    for name in ("job_search.LOOK", "schedules._MOST", "schedules.LOOK"):
        monkeypatch.setattr(f"tidemill.dashboard.{name}", 5)
    monkeypatch.setattr("tidemill.dashboard.job_search.PATIENCE", 0)
    monkeypatch.setattr("tidemill.brokers.lmdb.look.inspect._SCAN", 5)
    # then the pages say that they looked at a part, and go on
    flows = anna.get("/flows")
    assert "No flow yet" not in flows
    assert put.id in flows or "Only the latest jobs were looked at." in flows
    while put.id not in flows:
        flows = anna.get(html.unescape(re.findall(r'rel="next" href="([^"]+)"', flows)[0]))
    schedule = anna.get("/schedules/nightly")
    assert "Only a part of the store was looked at." in words(schedule)
    while of_schedule not in schedule:
        [link, *_] = re.findall(r'href="([^"]+)">(?:Go on|Older)', schedule)
        schedule = anna.get(html.unescape(link))


# -- acting ----------------------------------------------------------------------------------------


def test_selected_jobs_are_retried_and_refused_with_the_reason(
    mill: Tidemill, anna: Visitor
) -> None:
    bad, good = pay(mill, -1, 1)
    run_all(mill)
    form = {"act": "retry", "id": bad}
    assert anna.act("/jobs/act", **form) == "ok: retried 1 job"
    assert mill.job(bad).state is State.READY
    said = anna.act("/jobs/act", act="retry", id=good)
    assert "1 refused: it succeeded already" in said
    assert [(n.who, n.what, n.target) for n in notes(mill.broker)] == [
        ("anna", "retried jobs", bad)
    ]


def test_nothing_selected_and_unknown_actions_are_refused(anna: Visitor) -> None:
    assert anna.act("/jobs/act", act="retry").startswith("error: select jobs first")
    anna.post("/jobs/act", 400, act="explode", id="1")


@pytest.mark.parametrize(
    ("act", "state"), [("cancel", State.CANCELLED), ("delete", None), ("terminate", "cancelled")]
)
def test_a_job_is_acted_on_from_its_page(
    mill: Tidemill, anna: Visitor, act: str, state: State | None
) -> None:
    job_id = pay(mill, 1)[0]
    assert anna.act(f"/jobs/{job_id}/act", act=act).startswith("ok")
    record = mill.broker.get(job_id)
    assert (record.state if record else None) == state


def test_a_waiting_job_gets_another_queue_and_priority(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, 1)[0]
    assert f'href="/jobs/{job_id}/alter"' in anna.get(f"/jobs/{job_id}")
    assert "is in queue default, priority 0" in words(anna.get(f"/jobs/{job_id}/alter"))
    form = {"act": "alter", "to_queue": "slow", "to_priority": "7.5"}
    assert anna.act(f"/jobs/{job_id}/act", **form) == "ok: altered the job"
    record = mill.job(job_id).refresh()
    assert (record.envelope.queue, record.public()["priority"]) == ("slow", 7.5)
    [note] = notes(mill.broker)
    assert (note.who, note.what) == ("anna", "altered job to queue slow, priority 7.5")
    assert note.target == job_id
    assert "altered: queue slow, priority 7.5" in words(anna.get(f"/jobs/{job_id}"))
    # and its new priority is that of a run with edits
    assert 'name="priority" value="7.5"' in anna.get(f"/jobs/{job_id}/edit")


def test_a_job_that_does_not_wait_is_not_altered(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, 1)[0]
    run_all(mill)
    assert f"/jobs/{job_id}/alter" not in anna.get(f"/jobs/{job_id}")
    form = {"act": "alter", "to_queue": "slow", "to_priority": ""}
    assert anna.act(f"/jobs/{job_id}/act", **form) == "error: it succeeded already"
    assert [*notes(mill.broker)] == []


def test_selected_jobs_are_altered_after_a_form(mill: Tidemill, anna: Visitor) -> None:
    ids = pay(mill, 1, 2)
    asked = anna.post("/jobs/act", 200, act="alter", id=ids[0], back="/jobs?q=queue:default")
    text = read(asked)
    assert "1 selected job" in words(text)
    assert re.findall(r'name="id" value="([^"]+)"', text) == ids[:1]
    assert 'name="back" value="/jobs?q=queue:default"' in text
    form = {"act": "alter", "id": ids[0], "to_queue": "slow", "to_priority": ""}
    assert anna.act("/jobs/act", **form) == "ok: altered 1 job"
    assert [mill.job(i).refresh().envelope.queue for i in ids] == ["slow", "default"]


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"to_queue": "", "to_priority": ""}, "alter needs another priority, another queue"),
        ({"to_queue": "", "to_priority": "high"}, "priority must be a number"),
        ({"to_queue": "", "to_priority": "nan"}, "priority must be a number"),
        ({"to_queue": "a\tb", "to_priority": ""}, "control or invisible"),
    ],
)
def test_a_bad_target_is_refused(
    mill: Tidemill, anna: Visitor, form: dict[str, str], said: str
) -> None:
    job_id = pay(mill, 1)[0]
    response = anna.post(f"/jobs/{job_id}/act", 400, act="alter", **form)
    assert said in words(read(response))
    assert mill.job(job_id).refresh().envelope.queue == "default"


def test_a_viewer_sees_and_changes_nothing(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, 1)[0]
    vera = Visitor(mill, VIEWER)
    assert "Cancel" not in words(vera.get(f"/jobs/{job_id}"))
    for path, form in (
        (f"/jobs/{job_id}/act", {"act": "cancel"}),
        (f"/jobs/{job_id}/act", {"act": "alter", "to_queue": "slow"}),
        ("/jobs/act", {"act": "delete", "id": job_id}),
        ("/jobs/act", {"act": "alter", "id": job_id}),
        ("/bulk", {"act": "alter", "q": "queue:default", "to_queue": "slow"}),
        (f"/jobs/{job_id}/edit", {"arguments": "{}"}),
        ("/bulk", {"act": "delete", "q": "queue:default"}),
    ):
        vera.post(path, 403, **form)
    assert mill.job(job_id).state is State.READY


# -- one job ---------------------------------------------------------------------------------------


def test_the_page_of_a_job_tells_its_life(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, -3, tags=("big",), key="order-3")[0]
    run_all(mill)
    text = words(anna.get(f"/jobs/{job_id}"))
    for part in (
        "It failed: ",
        "no order -3",
        "waits to start",
        "attempt 1 of 1 failed",
        "order -3",
        "pays -3",
        "1 of 2 (50 %): asks the bank",
        "order-3",
        "mill.enqueue(mill.call('shop.pay', -3)",
        '{"task":"shop.pay","args":[-3],"kwargs":{},"queue":"default"}',
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("cookie", "site", "zone", "shown"),
    [
        ("Asia/Tokyo", "Europe/Berlin", "Asia/Tokyo", "2100-01-01 08:30:00 JST"),
        ("UTC", "Europe/Berlin", "UTC", "2099-12-31 23:30:00 UTC"),
        ("", "Europe/Berlin", "Europe/Berlin", "2100-01-01 00:30:00 CET"),
        ("../x", "", "UTC", "2099-12-31 23:30:00 UTC"),
        ("localtime", "Europe/Berlin", "Europe/Berlin", "2100-01-01 00:30:00 CET"),
    ],
)
def test_all_times_are_in_the_zone_of_the_viewer(
    mill: Tidemill, cookie: str, site: str, zone: str, shown: str
) -> None:
    moment = dt.datetime(2099, 12, 31, 23, 30, tzinfo=dt.UTC)
    job = mill.queue("mail").put("a", at=moment)
    anna = Visitor(Dashboard(mill, zone=site))
    anna.cookies["tidemill_zone"] = cookie
    text = anna.get(f"/jobs/{job.id}")
    assert f"Due {shown}" in words(text)
    assert f"It waits until {shown[:-4]}, in" in words(text)
    assert f'title="{shown}"' in text
    assert f'data-zone="{zone}"' in text
    assert explain_in(mill.broker, job.refresh()).startswith(
        f"It waits until {moment.astimezone():%Y-%m-%d %H:%M:%S}, in"
    )


TRACE = """\
Traceback (most recent call last):
  File "/srv/shop/tasks.py", line 13, in send
    return render(n)
           ^^^^^^^^^
  File "/srv/.venv/lib/python3.11/site-packages/jinja2/environment.py", line 12, in render
    self.handle_exception()
  File "/usr/lib/python3.11/json/decoder.py", line 37, in decode
    obj, end = self.raw_decode(s)
  [Previous line repeated 3 more times]
ValueError: no
  File is not here

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/srv/shop/mail.py", line 1, in f
    g()
ValueError: 3
"""


def test_frames_of_other_code_than_the_users_are_folded(mill: Tidemill, anna: Visitor) -> None:
    parts = frames(TRACE)
    assert "".join(part.text for part in parts) == TRACE
    assert [(part.number, part.packages) for part in parts] == [
        (1, ()),
        (2, ("jinja2", "json")),
        (1, ()),
    ]
    assert parts[2].text.startswith("ValueError: no")
    others = TRACE.replace("/srv/shop", "/srv/lib/python3.11/site-packages/shop")
    assert frames(others) == [(others, (), 0)]
    # and on the page of a job
    mill.enqueue(mill.tasks["shop.pay"].call(1))
    mill.broker.attach(Owner(id="w1", name="box:1", host="box", pid=1, concurrency=1))
    [lease] = mill.broker.exchange(Step("w1", want=Want(1))).leases
    failed = Verdict(lease.token, Outcome.FAIL, error="ValueError: no", traceback=TRACE)
    mill.broker.exchange(Step("w1", [failed]))
    text = anna.get(f"/jobs/{lease.open().id}")
    assert text.count("<summary>2 frames in jinja2, json</summary>") == 1
    assert "<summary>2 frames in jinja2, json</summary>" in anna.get("/failed")


def test_an_unknown_zone_of_the_site_is_refused(mill: Tidemill) -> None:
    with pytest.raises(InvalidOption, match="zone must be a time zone"):
        Dashboard(mill, zone="Europe/Berlim")


def test_a_result_and_large_arguments_are_shown_in_full(mill: Tidemill, anna: Visitor) -> None:
    note = "x" * 50_000
    task = mill.tasks["shop.pay"]
    job = mill.enqueue(task.call(21, note=note))
    run_all(mill)
    text = anna.get(f"/jobs/{job.id}")
    assert note in text
    assert re.search(r"Result</h2><pre>42</pre>", text)


def test_a_ready_job_names_what_it_waits_for(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, 1, queue="mail")[0]
    assert "no worker serves queue mail" in words(anna.get(f"/jobs/{job_id}"))
    mill.queue("mail").pause()
    anna.dashboard.looks.forget()
    assert "queue mail is paused" in words(anna.get(f"/jobs/{job_id}"))


def test_a_job_that_is_gone_is_told_from_an_unknown_job(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, 1)[0]
    mill.job(job_id).delete()
    assert "no longer kept" in words(anna.get(f"/jobs/{job_id}", 404))
    assert "no job has the id nobody" in words(anna.get("/jobs/nobody", 404))


def test_the_file_of_a_job_needs_nothing_else(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, -3)[0]
    run_all(mill)
    text = anna.get(f"/jobs/{job_id}/file")
    assert "attachment" in anna.last.headers["content-disposition"]
    assert "no order -3" in text
    assert not re.search(r'(src|href)="', text)


# -- edit and run again ----------------------------------------------------------------------------


def test_a_job_runs_again_with_edits_and_links_to_its_origin(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, -3)[0]
    run_all(mill)
    form = html.unescape(anna.get(f"/jobs/{job_id}/edit"))
    assert '"args": [\n    -3\n  ]' in form
    edited = json.dumps({"args": [4], "kwargs": {"note": "by hand"}})
    sent = {"arguments": edited, "queue": "default", "priority": "7"}
    location = anna.post(f"/jobs/{job_id}/edit", **sent).headers["location"]
    new = location.removeprefix("/jobs/")
    run_all(mill)
    assert mill.job(new).result() == 8
    assert mill.job(new).record.envelope.headers[RERUN_OF] == job_id
    assert "run again from" in words(anna.get(location))
    assert mill.job(job_id).state is State.FAILED


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        ({"arguments": "{"}, "the arguments are no JSON"),
        ({"arguments": "[1]"}, "write the arguments as"),
        ({"arguments": '{"args": [], "kwargs": {}}'}, "missing a required argument"),
        ({"priority": "101"}, "priority must be from -100 to 100"),
        ({"priority": "high"}, "priority must be a number"),
        ({"queue": ""}, "queue"),
    ],
)
def test_bad_edits_are_refused_and_kept_in_the_form(
    mill: Tidemill, anna: Visitor, sent: dict[str, str], sentence: str
) -> None:
    job_id = pay(mill, 1)[0]
    good = {"arguments": '{"args": [1], "kwargs": {}}', "queue": "default", "priority": "0"}
    response = anna.post(f"/jobs/{job_id}/edit", 400, **{**good, **sent})
    assert sentence in words(read(response))
    assert len(list(mill.jobs())) == 1


def test_arguments_that_json_lacks_cannot_be_edited(mill: Tidemill, anna: Visitor) -> None:
    job = mill.enqueue(mill.tasks["shop.pay"].call(1, note=(1, 2)))
    assert "have a type that JSON lacks" in words(anna.get(f"/jobs/{job.id}/edit"))


def test_only_the_role_for_edits_edits(mill: Tidemill, anna: Visitor) -> None:
    job_id = pay(mill, 1)[0]
    otto = Visitor(Dashboard(mill), User("otto", Role.OPERATOR))
    otto.get(f"/jobs/{job_id}/edit", 403)
    olga = Visitor(Dashboard(mill, edit_jobs="operator"), User("olga", Role.OPERATOR))
    olga.get(f"/jobs/{job_id}/edit")


# -- hostile names and hidden arguments ------------------------------------------------------------


def test_hostile_names_are_text_on_every_page(mill: Tidemill) -> None:
    @mill.task(name=HOSTILE, retries=0, tags=(HOSTILE,), queue=HOSTILE)
    def bad(value: str) -> None:
        this_job().log(HOSTILE)
        this_job().progress(1, 2, HOSTILE)
        raise ValueError(HOSTILE)

    job = mill.enqueue(bad.call(HOSTILE).using(key=HOSTILE, headers={HOSTILE: HOSTILE}))
    mill.schedules.add(HOSTILE, bad.call(HOSTILE), "0 3 * * *")
    run_all(mill)
    anna = Visitor(mill, User(HOSTILE))
    anna.act(f"{anna.dashboard_path(HOSTILE)}/pause")
    task = anna.dashboard_path(HOSTILE).removeprefix("/queues")
    for path in (
        *("/", "/queues", f"/queues{task}", "/workers", "/audit", "/settings"),
        *("/jobs", "/jobs?q=state:failed", f"/jobs/{job.id}", f"/jobs/{job.id}/file"),
        *(f"/jobs/{job.id}/edit", "/failed", "/tasks", f"/tasks{task}", "/schedules"),
        *(f"/schedules{task}", "/bulk/new?act=retry&q=state:failed", "/limits", "/flows"),
        *(
            f"{path}%3Cimg+src%3Dx+onerror%3D%22alert(1)%22%3E"
            for path in ("/jobs?q=", "/queues?name=")
        ),
    ):
        text = anna.get(path)
        assert "<img src=x" not in text, path
        assert not re.search(r"<[^>]*\sstyle=", text.replace("<style>", "")), path


def test_a_role_that_does_not_see_arguments_finds_them_nowhere(
    mill: Tidemill, anna: Visitor
) -> None:  # case S8
    task = mill.tasks["shop.pay"]
    job = mill.enqueue(task.call(-12_345, note="secret-note").using(headers={"h": "secret-head"}))
    mill.schedules.add("nightly", task.call(1, note="secret-note"), "0 3 * * *")
    run_all(mill)
    vera = Visitor(Dashboard(mill, see_arguments="operator"), VIEWER)
    for path in (
        *("/jobs", f"/jobs/{job.id}", f"/jobs/{job.id}/file", "/jobs.json", "/jobs.csv"),
        *("/schedules", "/schedules/nightly", "/tasks/shop.pay"),
    ):
        assert "secret" not in vera.get(path), path
    vera.get("/jobs?q=args:secret-note", 403)


def test_a_role_that_does_not_see_arguments_finds_no_key(mill: Tidemill, anna: Visitor) -> None:
    task = mill.tasks["shop.pay"]
    limit = Limit("1/h", name="mail", key="secret-limit")
    jobs = [mill.enqueue(task.call(n).using(limit=limit, key=f"secret-{n}")) for n in (1, 2)]
    run_all(mill)
    vera = Visitor(Dashboard(mill, see_arguments="operator"), VIEWER)
    paths = [f"/jobs/{job.id}{more}" for job in jobs for more in ("", "/file")]
    for path in (*paths, "/jobs.json", "/jobs.csv", "/limits"):
        assert "secret" not in vera.get(path), path
    assert "hidden" in vera.get(f"/jobs/{jobs[1].id}")


# -- exports ---------------------------------------------------------------------------------------


def test_all_jobs_that_match_are_exported(mill: Tidemill, anna: Visitor) -> None:
    ids = pay(mill, -1, 2, 3)
    run_all(mill)
    lines = anna.get("/jobs.json?q=state:succeeded").splitlines()
    assert [json.loads(line)["id"] for line in lines] == ids[:0:-1]
    rows = anna.get("/jobs.csv").splitlines()
    assert rows[0].startswith("id,task,queue,state,created")
    assert len(rows) == 4
    anna.get("/jobs.exe", 400)


def test_a_cell_is_never_a_formula(mill: Tidemill, anna: Visitor) -> None:
    mill.queue("q").put("x", key="=1+1")
    assert ",'=1+1," in anna.get("/jobs.csv")
