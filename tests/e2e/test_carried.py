"""Real workers on a store whose ready jobs RabbitMQ brings: faults between the two."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from harness import SLACK, Place, check_counters, eventually, open_place, runs_of
from servers import CARRIED, RabbitMQ, Redis, carried_url

from tidemill import Tidemill, chain, group
from tidemill.cli import main
from tidemill.core.clock import new_id
from tidemill.core.job import State
from tidemill.core.owner import Owner

S = State

sys.path.append(str(Path(__file__).resolve().parent.parent / "faults"))
from checker import check  # noqa: E402

APP = """
forever = Retries(1000, delay=0)

@mill.task(retries=forever)
def work(n=0):
    begin(); time.sleep(0.003); end(); return n

@mill.task
def double(n): begin(); end(); return 2 * n

@mill.task(retries=forever)
def waits():
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()
"""

POINTS = ["relay.leased", "relay.published", "carried.brought", "carried.taken", "worker.exchanged"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place on an LMDB store and the RabbitMQ that tests share."""
    folder = tmp_path / "p"
    folder.mkdir()
    with open_place(folder, carried_url(f"lmdb://{folder}/store", "t" + new_id())) as place:
        place.write(APP)
        yield place


@pytest.fixture(params=sorted(CARRIED))
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place on each store over a network."""
    folder = tmp_path / "p"
    folder.mkdir()
    with open_place(folder, CARRIED[request.param]("t" + new_id())) as place:
        place.write(APP)
        yield place


def carried(place: Place) -> int:
    """How many jobs lie with the carrier."""
    return sum(row.carried for row in place.mill.queues())


def crashes(place: Place) -> list[float]:
    """When processes died at a point."""
    path = place.path / "crashes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [float(line.split()[2]) for line in lines]


@pytest.mark.everyday("relay.leased", "relay.published", "carried.brought", "carried.taken")
@pytest.mark.parametrize("point", POINTS)
def test_kill_at_each_step_between_store_and_carrier(place: Place, point: str) -> None:
    # case Q20, laws 1, 3
    rng, accepted = random.Random(point), list[str]()
    for round_ in range(1, 4):
        accepted += [job.id for job in place.enqueue_many("work", [(n,) for n in range(60)])]
        env = {
            "TIDEMILL_CRASH": f"{point}:{rng.randint(1, 2)}",
            "TIDEMILL_CRASH_LOG": str(place.path / "crashes"),
        }
        worker = place.worker(slots=3, env=env)
        for n in range(500):  # one by one: each a step of its own
            if worker.process.poll() is not None:
                break
            accepted.append(place.enqueue("work", n).id)
            time.sleep(0.02)
        worker.wait()
        assert len(crashes(place)) == round_
    place.drain(slots=4)
    check(place, accepted, crashes(place))
    assert carried(place) == 0


def test_two_workers_run_every_job_once(anywhere: Place) -> None:  # case Q8
    place = anywhere
    for _ in range(2):
        place.worker(slots=4)
    place.finish([job for _ in range(10) for job in place.enqueue_many("work", [(1,)] * 20)], 60)
    assert {len(one) for one in runs_of(place.ledger()).values()} == {1}
    assert len(runs_of(place.ledger())) == 200
    check_counters(place)


def test_a_burst_ends_when_all_is_done(anywhere: Place) -> None:
    place, m = anywhere, anywhere.module
    chains = [chain(m.work.call(3), m.double, m.double) for _ in range(3)]
    jobs = [m.mill.enqueue(one) for one in chains]
    jobs.append(m.mill.enqueue(group([m.work.call(n) for n in range(5)])))
    assert place.worker("--burst", slots=2).wait() == 0
    assert place.unfinished() == 0
    assert [job.result(timeout=1) for job in jobs[:3]] == [12] * 3


@pytest.mark.everyday
def test_jobs_of_a_killed_worker_start_on_another_at_once(place: Place) -> None:  # laws 5, 6
    first = place.worker(slots=2).wait_ready()
    jobs = [place.enqueue("waits") for _ in range(2)]
    place.wait_notes("begin", 2)
    others = place.enqueue_many("work", [(n,) for n in range(30)])  # some are on their way to it
    place.worker(slots=4).wait_ready()
    first.kill_everything()
    killed = time.time()
    place.wait_notes(f"begin {jobs[0].id} 2")
    place.wait_notes(f"begin {jobs[1].id} 2")
    again = [line.time for line in place.ledger() if line.what == "begin" and line.attempt == 2]
    assert max(again) - killed < 1.0 + SLACK
    (place.path / "go").touch()
    place.finish([*jobs, *others])
    check(place, [job.id for job in [*jobs, *others]], [killed])


def test_cancel_delete_and_pause_reach_what_the_carrier_has(place: Place) -> None:  # law 14
    # in this order, so that no job of the other queue is prefetched
    worker = place.worker("-Q", "default,other", slots=1).wait_ready()
    first = place.enqueue("waits")
    place.wait_notes("begin")
    jobs = place.enqueue_many("work", [(n,) for n in range(6)])
    other = place.enqueue_many("work", [(n,) for n in range(3)], queue="other")
    eventually(lambda: carried(place) >= 8, "they lie with the carrier")
    *runs, cancelled, deleted = jobs  # one of the first jobs may be prefetched
    assert cancelled.cancel()
    assert place.mill.broker.delete([deleted.id]) == [True]
    place.mill.broker.set_queue("other", paused=True)
    (place.path / "go").touch()
    place.finish([first, *runs])
    assert cancelled.refresh().state is S.CANCELLED
    eventually(lambda: carried(place) == 0, "those of a paused queue go back")
    assert {job.refresh().state for job in other} == {S.READY}
    place.mill.broker.set_queue("other", paused=False)
    place.finish(other)
    ran = {line.id for line in place.ledger()}
    assert ran == {job.id for job in [first, *runs, *other]}
    assert worker.stop() == 0


def test_a_server_that_is_killed_under_load_loses_nothing(tmp_path: Path) -> None:  # law 1
    server = RabbitMQ()
    folder = tmp_path / "p"
    folder.mkdir()
    url = carried_url(f"lmdb://{folder}/store", "t" + new_id(), server.url)
    try:
        with open_place(folder, url) as place:
            place.write(APP)
            worker = place.worker(slots=2).wait_ready()
            place.finish([place.enqueue("work")])
            server.sync()
            accepted = [job.id for job in place.enqueue_many("work", [(n,) for n in range(300)])]
            place.wait_notes("end", 50)
            server.kill()
            accepted += [place.enqueue("work", n).id for n in range(20)]  # the store takes them
            server.start()
            worker._until(lambda: not place.unfinished(), "draining", 90.0)
            assert worker.stop() == 0
            check(place, accepted, [])
            assert {len(one) for one in runs_of(place.ledger()).values()} == {1}
    finally:
        server.close()


def test_a_store_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    server = Redis(durable=True)  # a step that was answered is on disk
    folder = tmp_path / "p"
    folder.mkdir()
    name = "t" + new_id()
    try:
        with open_place(folder, carried_url(f"{server.url}?prefix={name}", name)) as place:
            place.write(APP)
            worker = place.worker(slots=2).wait_ready()
            jobs = place.enqueue_many("work", [(n,) for n in range(300)])
            place.wait_notes("end", 30)
            server.kill()
            server.start()
            worker._until(lambda: not place.unfinished(), "draining", 60.0)
            assert worker.stop() == 0
            check(place, [job.id for job in jobs], [])
    finally:
        server.close()


def test_a_worker_that_ends_leaves_no_threads_and_nothing_behind(tmp_path: Path) -> None:
    store_url = f"lmdb://{tmp_path}/store"
    url = carried_url(store_url, "t" + new_id())
    before = set(threading.enumerate())
    with Tidemill(url, allow_imports=["*"]) as mill:
        for name in "ab":
            mill.broker.attach(Owner(id=name, kind="worker", name=name))
        for n in range(100):
            mill.enqueue("math.copysign", n, 1)
        mill.broker.detach("a")  # while they are brought over
    left = [t for t in set(threading.enumerate()) - before if t.name == "tidemill-relay"]
    assert not left
    with Tidemill(store_url) as store:
        [row] = store.queues()
        assert row.running == 0
        assert store.broker.recall() == row.carried


@pytest.mark.everyday
def test_recall_and_queues_on_the_command_line(tmp_path: Path) -> None:
    store_url = f"lmdb://{tmp_path}/store"
    url = carried_url(store_url, "t" + new_id())
    with Tidemill(url, allow_imports=["*"]) as mill:
        ids = [mill.enqueue("math.copysign", n, 1).id for n in range(3)]
        mill.broker.attach(Owner(id="w", kind="worker", name="w"))
        eventually(lambda: sum(row.carried for row in mill.queues()) == 3, "they are carried")
    run = CliRunner().invoke
    shown = run(main, ["queues", "--url", url])
    assert "3 with the carrier" in shown.output
    told = run(main, ["explain", "--url", url, ids[0]]).output.replace("\n", " ")
    assert "it lies with amqp://" in told
    checked = run(main, ["doctor", "--url", url, "--json"]).output
    assert '"carrier", "status": "ok"' in " ".join(checked.split())
    assert "3 ready jobs, of 3 that it was given" in checked
    facts = json.loads(run(main, ["info", "--url", url, "--json"]).output)
    assert facts["store"]["broker"] == "rabbitmq+lmdb"
    assert run(main, ["recall", "--url", url]).output.startswith("3 jobs recalled")
    assert run(main, ["recall", "--url", url]).output.startswith("0 jobs recalled")
    assert json.loads(run(main, ["recall", "--url", url, "--json"]).output) == {"recalled": 0}
    refused = run(main, ["recall", "--url", store_url])
    assert refused.exit_code != 0
