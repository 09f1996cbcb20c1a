"""The pages of failures, tasks, schedules, limits and flows."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET

import msgspec
import pytest
from dashboard_desk import Visitor, read, words

from tidemill import Fail, Limit, Tidemill, chain, group
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import (
    FAILED,
    HOUR,
    MINUTE,
    RUNS,
    SUCCEEDED,
    WIDTH,
    HistoryRow,
    join_name,
)
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.generic.notes import Notes
from tidemill.client.history import Deploy
from tidemill.core.fingerprint import FailureSample
from tidemill.core.job import Outcome, Owner, State, Verdict
from tidemill.dashboard.roles import Role, User
from tidemill.schedules.record import decode, encode, fired
from tidemill.testing import run_all

OTTO = User("otto", Role.OPERATOR)


@pytest.fixture
def anna(mill: Tidemill) -> Visitor:
    @mill.task(name="shop.pay", retries=0, limit=Limit("1000/s", concurrency=3, name="bank"))
    def pay(order: int, key: str = "") -> int:
        if order < 0:
            raise Fail(f"no order {order}")
        return order

    @mill.task(name="shop.ship", retries=0)
    def ship(what: object) -> str:
        return f"shipped {what}"

    return Visitor(mill)


# -- failures ------------------------------------------------------------------------------------


def test_failures_of_one_place_are_one_row(mill: Tidemill, anna: Visitor) -> None:
    pay = mill.tasks["shop.pay"]
    mill.enqueue_many([pay.call(-n) for n in range(1, 8)])
    run_all(mill)
    text = anna.get("/failed")
    assert text.count("failure-head") == 1
    for part in ("Fail", "shop.pay", "7 , 7 kept", "Retry 5, then all"):
        assert part in words(text), part


def test_a_failure_that_no_worker_counted_is_in_the_last_hour(
    mill: Tidemill, anna: Visitor
) -> None:
    mill.enqueue(mill.tasks["shop.pay"].call(1))
    mill.broker.attach(Owner(id="w1", name="box:1", host="box", pid=1, concurrency=1))
    [lease] = mill.broker.exchange(Step("w1", want=Want(1))).leases
    lost = Verdict(lease.token, Outcome.FAIL, error="its process was killed")
    mill.broker.exchange(Step("w1", [lost]))
    text = words(anna.get("/failed"))
    assert "1 failed attempt" in text
    assert "Last hour 1" in text


def test_a_filter_lists_the_failures_that_only_the_latest_release_has(
    mill: Tidemill, anna: Visitor
) -> None:
    now = int(time.time())
    alone = "No failure is new, since there was no second release yet"
    assert alone in words(anna.get("/failed?new=1"))
    keep_runs(mill, "v1", now - 1000, 99, 1)
    keep_runs(mill, "v2", now - 500, 80, 20)
    keep_failure(mill, "OldError", "v1", now - 2 * 86_400)
    keep_failure(mill, "OldError", "v2", now)
    anna.dashboard.cache.clear()
    none = words(anna.get("/failed?new=1"))
    assert "No failure of the last hour is new in v2" in none
    assert "OldError" not in none
    keep_failure(mill, "NewError", "v2", now)
    anna.dashboard.cache.clear()
    text = anna.get("/failed?new=1&over=24h")
    assert "NewError new in v2" in words(text)
    assert "OldError" not in text
    # and the links keep the choices
    assert 'href="/failed?over=24h">All</a>' in text
    assert 'href="/failed?new=1&amp;over=7d"' in text
    assert "OldError" in anna.get("/failed?over=24h")


def test_a_muted_failure_is_folded_until_it_is_shown_again(mill: Tidemill, anna: Visitor) -> None:
    mill.enqueue(mill.tasks["shop.pay"].call(-1))
    run_all(mill)
    [path] = set(re.findall(r'action="(/failed/\w+)/mute"', anna.get("/failed")))
    assert anna.act(f"{path}/mute", task="shop.pay").startswith("ok: muted")
    assert "1 muted" in words(anna.get("/failed"))
    assert anna.act(f"{path}/unmute", task="shop.pay").startswith("ok")
    assert "muted" not in words(anna.get("/failed"))
    anna.post("/failed/0123/mute", 404, task="shop.pay")


# -- tasks ---------------------------------------------------------------------------------------


def keep_runs(mill: Tidemill, release: str, deployed: int, good: int, bad: int) -> None:
    """History of a release, as its workers would have kept it."""
    counts = [0] * WIDTH
    counts[SUCCEEDED], counts[FAILED] = good, bad
    counts[RUNS.start + 5] = good + bad
    at = int(time.time()) // MINUTE * MINUTE
    name = join_name("default", "shop.pay", release)
    with_history(mill.broker, "a test").keep_history(
        [HistoryRow("task", name, MINUTE, at, tuple(counts))]
    )
    body = msgspec.msgpack.encode(Deploy(release, deployed))
    Notes(mill.broker, "deploy", "a test").put(release, body)


def keep_failure(mill: Tidemill, error: str, release: str, at: int) -> None:
    """History of one failed attempt, by minute and by hour, as a worker would have kept it."""
    counts = [0] * WIDTH
    counts[FAILED] = 1
    sample = msgspec.msgpack.encode(FailureSample(error=error, task="shop.pay", time=at))
    name = join_name(error, "shop.pay", release)
    with_history(mill.broker, "a test").keep_history(
        [
            HistoryRow("failure", name, span, at // span * span, tuple(counts), sample)
            for span in (MINUTE, HOUR)
        ]
    )


def test_a_task_tells_what_a_release_changed(mill: Tidemill, anna: Visitor) -> None:
    now = int(time.time())
    keep_runs(mill, "v1", now - 1000, 99, 1)
    keep_runs(mill, "v2", now - 500, 80, 20)
    text = words(anna.get("/tasks/shop.pay"))
    assert "v2 beside v1" in text
    assert "Failed attempts 1.0 % 20 % worse" in text
    assert "Deploys: v1" in text
    assert "200" in words(anna.get("/tasks"))


# -- schedules -----------------------------------------------------------------------------------


@pytest.fixture
def nightly(mill: Tidemill, anna: Visitor) -> str:
    mill.schedules.add("nightly", mill.tasks["shop.pay"].call(1), "0 3 * * 1-5", zone="Asia/Tokyo")
    return "/schedules/nightly"


def test_a_schedule_says_when_it_comes(anna: Visitor, nightly: str) -> None:
    text = anna.get(nightly)
    assert "at 03:00, Monday to Friday (Asia/Tokyo)" in words(text)
    assert len(re.findall(r"03:00:00 JST", text)) == 5
    assert "at 03:00, Monday to Friday" in words(anna.get("/schedules"))


def test_the_list_of_schedules_tells_how_the_last_job_of_each_ended(
    mill: Tidemill, anna: Visitor, nightly: str
) -> None:
    fire_all(mill)
    job = mill.schedules.get("nightly").last_job
    assert job is not None
    assert re.search(r"ready \S+ s ago", words(anna.get("/schedules")))
    run_all(mill)
    text = anna.get("/schedules")
    assert f'href="/jobs/{job}"' in text
    assert re.search(r"succeeded \S+ s ago , took [\d.]+ m?s", words(text))
    # when
    mill.job(job).delete()
    assert "left out, or deleted" in words(anna.get("/schedules"))


def test_the_list_of_schedules_reads_few_last_jobs_at_once(
    mill: Tidemill, anna: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(45):
        mill.schedules.add(f"s{n}", mill.tasks["shop.pay"].call(n), every=3600)
    fire_all(mill)
    asked: list[int] = []
    read_jobs = mill.broker.wait_for

    def wait_for(ids: list[str], timeout: float) -> object:
        asked.append(len(ids))
        return read_jobs(ids, timeout)

    monkeypatch.setattr(mill.broker, "wait_for", wait_for)
    assert words(anna.get("/schedules")).count(" ready ") == 45
    assert asked == [20, 20, 5]


def fire_all(mill: Tidemill) -> None:
    """Put a job of each schedule, as a worker does when they are due."""
    for record in mill.broker.list_schedules():
        stored = decode(record.body)
        stored.planned = mill.broker.wall() - 1
        due = Change(record.name, record.version, stored.planned, encode(stored))
        mill.broker.change_schedules([due])
    now = mill.broker.wall()
    mill.broker.change_schedules([fired(one, now) for one in mill.broker.list_schedules()])


def test_a_schedule_is_run_paused_resumed_and_removed(
    mill: Tidemill, anna: Visitor, nightly: str
) -> None:
    location = anna.post(f"{nightly}/run").headers["location"]
    assert mill.job(location.removeprefix("/jobs/")).state is State.READY
    assert location.removeprefix("/jobs/") in anna.get(nightly)
    anna.post(f"{nightly}/pause")
    assert mill.schedules.get("nightly").paused
    anna.post(f"{nightly}/resume")
    assert not mill.schedules.get("nightly").paused
    anna.post(f"{nightly}/remove", 400, confirm="other")
    anna.post(f"{nightly}/remove", confirm="nightly")
    assert not list(mill.schedules)
    anna.get(nightly, 404)


@pytest.mark.parametrize(
    ("form", "when"),
    [
        ({"kind": "cron", "text": "30 4 * * *", "zone": "Asia/Tokyo"}, "30 4 * * * Asia/Tokyo"),
        ({"kind": "every", "text": "90", "zone": ""}, "every 90 s"),
        ({"kind": "every", "text": "2 months", "zone": ""}, "every 2 months"),
        ({"kind": "at", "text": "2099-01-31T09:00", "zone": "UTC"}, "once at 2099-01-31 09:00:00"),
    ],
)
def test_a_schedule_gets_other_times(
    mill: Tidemill, anna: Visitor, nightly: str, form: dict[str, str], when: str
) -> None:
    anna.post(f"{nightly}/edit", **form)
    assert mill.schedules.get("nightly").when.startswith(when)
    assert len(mill.schedules.next_times("nightly")) >= 1
    # and the form offers the new rule
    assert f'value="{form["text"]}' in anna.get(nightly)


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"kind": "cron", "text": "61 * * * *"}, "its minute '61' is wrong"),
        ({"kind": "every", "text": "often"}, "is no interval"),
        ({"kind": "at", "text": "soon"}, "is no time"),
        ({"kind": "at", "text": "2001-01-01T00:00"}, "would never fire"),
        ({"kind": "never", "text": "x"}, "choose cron, every or at"),
        ({"kind": "cron", "text": "0 3 * * *", "zone": "Mars"}, "is no time zone"),
    ],
)
def test_bad_times_are_refused(
    mill: Tidemill, anna: Visitor, nightly: str, form: dict[str, str], sentence: str
) -> None:
    response = anna.post(f"{nightly}/edit", 400, **form)
    assert sentence in words(read(response))
    assert mill.schedules.get("nightly").when == "0 3 * * 1-5 Asia/Tokyo"


def test_an_operator_runs_a_schedule_and_changes_none(
    mill: Tidemill, anna: Visitor, nightly: str
) -> None:
    otto = Visitor(mill, OTTO)
    otto.post(f"{nightly}/run")
    for act in ("pause", "resume", "remove", "edit"):
        otto.post(f"{nightly}/{act}", 403)


# -- limits --------------------------------------------------------------------------------------


def test_a_limit_shows_its_settings_and_is_changed(mill: Tidemill, anna: Visitor) -> None:
    mill.enqueue(mill.tasks["shop.pay"].call(1))
    assert "3 at a time" in words(anna.get("/limits"))
    assert 'value="3"' in anna.get("/limits/edit?name=bank")
    anna.post("/limits/edit", name="bank", rate="5/s", concurrency="7", burst="", window="")
    [row] = mill.limits.list()
    assert (row.terms.rate, row.terms.concurrency, row.by_hand) == ((5.0, 1.0), 7, True)
    bad = anna.post("/limits/edit", 400, name="bank", rate="fast")
    assert "rate must be jobs per time" in words(read(bad))
    anna.post("/limits/edit", name="bank", declared="yes")
    assert mill.limits.list()[0].terms.concurrency == 3
    anna.get("/limits/edit?name=nobody", 400)
    Visitor(mill, OTTO).get("/limits/edit?name=bank", 403)


# -- flows ---------------------------------------------------------------------------------------


def test_a_flow_is_a_graph_with_a_link_to_each_job(mill: Tidemill, anna: Visitor) -> None:
    pay, ship = mill.tasks["shop.pay"], mill.tasks["shop.ship"]
    whole = chain(group([pay.call(n) for n in range(3)]), ship, ship).on_complete(ship)
    handle = mill.enqueue(whole)
    assert handle.id in anna.get("/flows")
    text = anna.get(f"/flows/{handle.id}")
    found = re.search(r'<svg class="flow fits".*?</svg>(?=</div>)', text, re.DOTALL)
    assert found
    tree = ET.fromstring(found[0])
    links = {link.get("href", "").removeprefix("/jobs/") for link in tree.iter("a")}
    assert links == {handle.steps[0].id, *(job.id for job in mill.jobs())}
    assert "waiting, 3 to go" in found[0]
    assert len(tree.findall("path")) == 6  # 3 members to the group, two steps, and the hook
    # and the page of a part leads to the whole
    assert f"/flows/{handle.id}" in anna.get(f"/jobs/{handle.id}.0000.0000001")


def test_the_list_of_flows_names_their_tasks(mill: Tidemill, anna: Visitor) -> None:
    # given flows that begin with a job, a chain and a group
    pay, ship = mill.tasks["shop.pay"], mill.tasks["shop.ship"]
    flows = {
        mill.enqueue(group([pay.call(1)])).id: "shop.pay",
        mill.enqueue(group([pay.call(n) for n in range(2)])).id: "shop.pay and 1 other",
        mill.enqueue(group([chain(ship.call(n), pay) for n in range(3)])).id: (
            "shop.ship and 2 others"
        ),
        mill.enqueue(chain(pay.call(1), ship)).id: "shop.pay , then … shop.ship",
        mill.enqueue(chain(group([pay.call(1), pay.call(2)]), ship)).id: (
            "shop.pay , then … shop.ship"
        ),
    }
    text = anna.get("/flows")
    for flow_id, what in flows.items():
        row = text.partition(f'href="/flows/{flow_id}"')[2].partition("</tr>")[0]
        assert f" {what} " in " ".join(words("<main" + row).split()), what


def test_the_failed_job_of_a_flow_is_retried_and_the_flow_cancelled(
    mill: Tidemill, anna: Visitor
) -> None:
    pay, ship = mill.tasks["shop.pay"], mill.tasks["shop.ship"]
    handle = mill.enqueue(chain(pay.call(-1), ship))
    run_all(mill)
    first = mill.job(f"{handle.id}.0000")
    assert (first.state, handle.state) == (State.FAILED, State.FAILED)
    assert anna.act(f"/flows/{handle.id}/retry").startswith("ok: retried")
    assert mill.job(first.id).state is State.READY
    # case M2: the same by the id of the chain; a job that cannot run is refused
    run_all(mill)
    assert anna.act(f"/jobs/{handle.id}/act", act="retry").startswith("ok: retried")
    assert mill.job(first.id).state is State.READY
    run_all(mill)
    longer = mill.enqueue(chain(pay.call(-2), ship, ship))
    run_all(mill)
    refused = anna.act(f"/jobs/{longer.steps[1].id}/act", act="retry")
    assert f"job {longer.steps[0].id}, which failed: " in refused
    assert mill.job(first.id).retry()
    anna.act(f"/flows/{handle.id}/cancel")
    assert mill.job(first.id).state is State.CANCELLED
    anna.get("/flows/nobody", 404)
