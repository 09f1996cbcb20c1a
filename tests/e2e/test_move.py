"""``tidemill move``: everything of one store into another, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import LIMIT, Place, eventually, open_place
from servers import NETWORK

from tidemill import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.contract.limits import with_limits
from tidemill.brokers.generic.audit import notes
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import LimitSettings
from tidemill.core.job import State
from tidemill.errors import FeatureMissing, StoreMoved
from tidemill.transfer.store_to_store import move

APP = """
@mill.task(retries=2)
def work(n):
    begin()
    return n

@mill.task
def slow():
    begin()
    while not os.path.exists(os.path.join(HERE, "go")):
        time.sleep(0.01)
    return "slow"
"""


def start(*words: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tidemill", "move", *words],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    process = start(*words, **env)
    out, err = process.communicate(timeout=3 * LIMIT)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def elsewhere(place: Place) -> str:
    return f"lmdb://{place.path}/target"


def ids(mill: Tidemill, *states: State) -> set[str]:
    found: set[str] = set()
    cursor = ""
    while True:
        page = mill.jobs(Filter(states=frozenset(states))).page(limit=1000, cursor=cursor)
        found |= {record.envelope.id for record in page.records}
        cursor = page.cursor
        if not cursor:
            return found


@pytest.mark.everyday
@pytest.mark.parametrize("where", ["move.adopting", "move.adopted"])
def test_a_move_killed_in_the_middle_goes_on_and_doubles_nothing(place: Place, where: str) -> None:
    place.write(APP)
    jobs = place.enqueue_many("work", [(n,) for n in range(1600)])
    later = place.enqueue("work", 7, delay=3600.0)
    target = elsewhere(place)
    # when: killed at each step in turn
    for count in (2, 1, 3):
        done = run(place.url, target, TIDEMILL_CRASH=f"{where}:{count}")
        assert done.returncode == -signal.SIGKILL
    done = run(place.url, target, "--json")
    # then
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stayed"] == []
    with Tidemill(target) as there:
        assert ids(there, State.READY) == {job.id for job in jobs}
        assert ids(there, State.SCHEDULED) == {later.id}
        numbers = [there.broker.get(job.id).seq for job in jobs]
        assert numbers == sorted(numbers)
    again = run(place.url, target)
    assert "has already moved to" in again.stdout
    with open_place(place.path, target) as moved:
        moved.write(APP)
        moved.worker().wait_ready()
        moved.finish([moved.mill.job(job.id) for job in jobs])
        begun = [line.id for line in moved.ledger()]
        assert sorted(begun) == sorted(job.id for job in jobs)


@pytest.mark.everyday
@pytest.mark.parametrize("where", ["move.scheduling", "move.scheduled"])
def test_schedules_go_over_once(place: Place, where: str) -> None:
    place.write(APP)
    mill = place.module.mill
    at = time.time() + 3600
    for n in range(3):
        mill.schedules.add(f"s{n}", place.module.work.call(n), at=at)
    mill.schedules.pause("s1")
    target = elsewhere(place)
    with Tidemill(target, allow_imports=["*"]) as there:
        there.schedules.add("s2", there.call("math.sqrt", 2), every=60)
        # when: killed in the middle, and what arrived has ended there meanwhile
        killed = run(place.url, target, TIDEMILL_CRASH=where)
        assert killed.returncode == -signal.SIGKILL
        arrived = where == "move.scheduled"
        assert [s.name for s in there.schedules] == (["s0", "s1", "s2"] if arrived else ["s2"])
        if arrived:
            there.schedules.remove("s0")
        done = run(place.url, target, "--json")
        # then
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert done.stdout.startswith('{\n  "from": ')  # indented as the documents of all verbs
        assert document["schedules"] == (0 if arrived else 2)
        assert document["stayed_schedules"] == ([] if arrived else ["s2"])
        rows = {schedule.name: schedule for schedule in there.schedules}
        assert sorted(rows) == (["s1", "s2"] if arrived else ["s0", "s1", "s2"])
        assert rows["s1"].paused
        assert rows["s2"].when == "every 60 s"
        if not arrived:
            assert rows["s0"].next.timestamp() == pytest.approx(at)
        assert run(place.url, target).returncode == 0
        assert {schedule.name: schedule for schedule in there.schedules} == rows


@pytest.mark.everyday
def test_a_move_waits_for_running_jobs_and_workers_leave(place: Place) -> None:
    place.write(APP)
    job = place.enqueue("slow")
    worker = place.worker().wait_ready()
    place.wait_notes("begin")
    waiting = place.enqueue("work", 1, delay=3600.0)
    # when
    process = start(place.url, elsewhere(place))
    eventually(lambda: "moves_to" in place.mill.broker.info(), "the departure")
    with pytest.raises(StoreMoved, match="target; use that url"):
        place.enqueue("work", 2)
    time.sleep(0.5)
    assert process.poll() is None
    assert job.refresh().state is State.RUNNING
    (place.path / "go").touch()
    # then
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert worker.wait() == 3
    assert "the worker ends: this store moves to" in worker.output
    with Tidemill(elsewhere(place)) as there:
        record = there.broker.get(job.id)
        assert (record.state, len(record.attempts)) == (State.SUCCEEDED, 1)
        assert there.job(job.id).result(1) == "slow"
        assert there.broker.get(waiting.id).state is State.SCHEDULED
    late = place.worker()
    assert late.wait() == 3
    assert "the worker ends: this store moves to" in late.output
    assert "use that url" in late.output


def test_a_move_can_be_called_off_while_nothing_has_arrived(place: Place, tmp_path: Path) -> None:
    place.write(APP)
    job = place.enqueue("work", 1)
    target = elsewhere(place)
    done = run(place.url, target, TIDEMILL_CRASH="move.adopting")
    assert done.returncode == -signal.SIGKILL
    assert run(place.url, "lmdb:///nowhere/else").returncode != 0
    assert run(place.url, target, "--cancel").returncode == 0
    assert job.cancel()
    other = place.enqueue("work", 2)
    assert run(place.url, target).returncode == 0
    refused = run(place.url, target, "--cancel")
    assert refused.returncode == 2
    assert "already" in refused.stderr
    same = run(target, target)
    assert same.returncode == 2
    with Tidemill(target) as there:
        assert there.broker.get(other.id).state is State.READY
        [moved, called_off] = notes(there.broker)
    assert (called_off.what, called_off.target) == ("cancelled move", f"to {target}")
    assert (moved.what, moved.target) == ("moved store", f"{place.url} to {target}")


@pytest.mark.parametrize(
    ("here", "there"), [("lmdb", "lmdb"), ("lmdb", "postgresql"), ("postgresql", "redis")]
)
def test_limits_move_along(tmp_path: Path, here: str, there: str) -> None:
    # law 13
    source, target = (
        Tidemill(NETWORK[kind](f"t{new_id()}") if kind in NETWORK else f"lmdb://{tmp_path}/{name}")
        for kind, name in ((here, "one"), (there, "two"))
    )

    @source.task(name="work", limit="1/h")
    def work() -> None: ...

    with source, target:
        job = work.enqueue()
        source.queue("q", rate="10/s")
        source.limits.set("work", rate="2/h")
        source.queue("q").limit(concurrency=3)
        terms = [(row.name, row.terms, row.declared) for row in source.limits.list()]
        move(source.broker, target.broker)
        assert [(row.name, row.terms, row.declared) for row in target.limits.list()] == terms
        target.limits.set("work", rate="0/s")
        found = with_limits(target.broker, "").held(job.id)
        assert found.name == "work"


def test_limits_are_not_left_behind_unseen() -> None:
    source, target = open_broker("memory://"), open_broker("memory://?keep=1")
    with_limits(source, "").set_limit("q", LimitSettings(concurrency=1), queue=True)
    target.features -= {Feature.LIMITS}
    with pytest.raises(FeatureMissing, match="a limit needs the feature limits"):
        move(source, target)
    assert "moves_to" not in source.info()  # it goes on as it was
