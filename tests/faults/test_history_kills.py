"""Kills in the middle of a step and of a move: each count is stored at most once."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Place, eventually
from servers import Postgres, Redis, postgres_store, redis_url
from servers.http import JobServer

from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HOUR, MINUTE, HistoryRow
from tidemill.brokers.registry import migrate_store, open_broker
from tidemill.core.clock import clock, new_id
from tidemill.core.rollup import FAILED, RUNS, SUCCEEDED

STORES: dict[str, Callable[[Path], str]] = {
    "lmdb": lambda folder: f"lmdb://{folder}/store",
    "redis": lambda folder: f"{redis_url()}?prefix=t{new_id()}&owner_lease=3",
    "postgresql": lambda folder: postgres_store(f"t{new_id()}&owner_lease=3"),
}
"""Stores on servers that no test kills."""

KILLS = 4
STEP_MOST = 150
"""Jobs that one step of a worker settles at most here."""

WORKER = """
import sys
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.history_rows import HOUR, MINUTE, HistoryRow
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Envelope, Outcome, Verdict
from tidemill.core.owner import Owner

broker = open_broker(sys.argv[1])
broker.put([Envelope(id=f"j{n}", task="t") for n in range(200)])
broker.attach(Owner(id="w", kind="worker"))
leases = broker.exchange(Step("w", want=Want(3))).leases
while leases:
    verdicts = [Verdict(lease.token, Outcome.SUCCESS) for lease in leases]
    rows = [HistoryRow("task", "t", span, 3600, (len(leases),)) for span in (MINUTE, HOUR)]
    leases = broker.exchange(Step("w", verdicts, Want(3), history=rows)).leases
    print(len(verdicts), flush=True)
"""


@pytest.mark.everyday("store.commit-10")
@pytest.mark.parametrize("count", [8, 10, 15])
@pytest.mark.parametrize("point", ["store.begun", "store.commit", "store.committed"])
def test_kill_in_the_middle_of_a_step(tmp_path: Path, point: str, count: int) -> None:
    # case Q20
    url = f"lmdb://{tmp_path}/store"
    done = subprocess.run(
        [sys.executable, "-c", WORKER, url],
        env={**os.environ, "TIDEMILL_CRASH": f"{point}:{count}"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == -9, done.stderr
    answered = sum(int(line) for line in done.stdout.split())
    broker = open_broker(url)
    history = with_history(broker, "history")
    succeeded = sum(row.succeeded for row in broker.stats())
    counts = [row.counts for span in (MINUTE, HOUR) for row in history.history("task", span)]
    broker.close()
    assert counts == [(succeeded,)] * 2
    assert answered <= succeeded <= answered + 3
    assert succeeded


RACER = """
import itertools, sys
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.history_rows import HOUR, MINUTE, HistoryRow
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Envelope, Outcome, Verdict
from tidemill.core.owner import Owner

broker, name = open_broker(sys.argv[1]), sys.argv[2]
broker.attach(Owner(id=name, kind="worker"))
for turn in itertools.count():
    broker.put([Envelope(id=f"{name}-{turn}-{n}", task="t") for n in range(30)])
    while leases := broker.exchange(Step(name, want=Want(3))).leases:
        verdicts = [Verdict(lease.token, Outcome.SUCCESS) for lease in leases]
        rows = [HistoryRow("task", "t", span, 3600, (len(leases),)) for span in (MINUTE, HOUR)]
        broker.exchange(Step(name, verdicts, history=rows))
        print(len(verdicts), flush=True)
"""


@pytest.mark.parametrize("store", STORES)
def test_kills_of_clients_at_any_time(tmp_path: Path, store: str) -> None:
    # given a store, and clients that settle jobs
    url, choose = STORES[store](tmp_path), random.Random(7)
    answered = 0
    # when each is killed at some moment
    for n in range(8):
        command = [sys.executable, "-c", RACER, url, f"w{n}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            for _ in range(choose.randrange(1, 40)):
                answered += int(client.stdout.readline())
            client.kill()
            answered += sum(int(line) for line in client.stdout.read().split())
    # then the counts are those of the settled jobs
    with contextlib.closing(open_broker(url)) as broker:
        history = with_history(broker, "history")
        succeeded = sum(row.succeeded for row in broker.stats())
        counts = [row.counts for span in (MINUTE, HOUR) for row in history.history("task", span)]
    assert counts == [(succeeded,)] * 2
    assert answered <= succeeded <= answered + 3 * 8


# -- workers and servers --------------------------------------------------------------------------


class Mortal:
    """A store on a server that a test kills; an LMDB store has none."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.server: Redis | Postgres | JobServer | None = None
        if kind == "redis":
            self.server = redis = Redis(durable=True)
            self.url = f"{redis.url}?owner_lease=3&patience=60"
        elif kind == "postgresql":
            self.server = postgres = Postgres()
            self.url = f"{postgres.url()}?owner_lease=3&patience=60"
            migrate_store(self.url)
        elif kind == "http":
            self.server = server = JobServer("--quiet")
            self.url = f"{server.url}?owner_lease=3&patience=60"
        else:
            self.url = f"lmdb://{folder}/store"

    def fall(self) -> None:
        """Kill the server, and start it again."""
        if self.server is not None:
            self.server.kill()
            self.server.start()

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


@pytest.fixture(params=["lmdb", "redis", "postgresql", "http"])
def mortal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mortal]:
    with contextlib.closing(Mortal(request.param, tmp_path)) as mortal:
        yield mortal


def test_kills_of_workers_and_of_their_server(mortal: Mortal, tmp_path: Path) -> None:
    # case Q20
    jobs = 1500
    with contextlib.closing(Place(tmp_path, mortal.url)) as place:
        # given a worker that runs many jobs
        place.write("@mill.task(retries=50)\ndef short():\n    time.sleep(0.004)\n")
        place.enqueue_many("short", [()] * jobs)
        worker = place.worker()
        # when workers and the server are killed in turn, in the middle
        for n in range(1, KILLS + 1):
            enough = functools.partial(have_succeeded, place, n * jobs // 6)
            eventually(enough, f"jobs before kill {n}", limit=180)
            if n % 2 or mortal.server is None:
                worker.kill_everything()
                worker = place.worker()
            else:
                mortal.fall()
        eventually(lambda: place.unfinished() == 0, "all jobs have ended", limit=180)
        assert worker.stop() == 0
        # then queues count all jobs, and the rows of tasks lack at most a step for each kill
        assert succeeded(place) == jobs
        history = with_history(place.mill.broker, "history")
        for span in (MINUTE, HOUR, ALWAYS):
            rows = [row.counts for row in history.history("task", span)]
            counted = sum(row[SUCCEEDED] for row in rows)
            assert jobs - KILLS * STEP_MOST <= counted <= jobs
            assert sum(row[FAILED] for row in rows) == 0
            assert sum(sum(row[RUNS]) for row in rows) == counted
        (_, queue) = place.mill.history.queues(3600)
        assert (queue.total("accepted"), queue.total("succeeded")) == (jobs, jobs)


def have_succeeded(place: Place, count: int) -> bool:
    return succeeded(place) >= count


def succeeded(place: Place) -> int:
    return sum(row.succeeded for row in place.mill.queues())


# -- moves ----------------------------------------------------------------------------------------


@pytest.mark.everyday("lmdb")
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("point", ["move.counting", "move.counted"])
def test_kill_in_the_middle_of_a_move(tmp_path: Path, point: str, kind: str) -> None:
    # case Q20
    source, target = (STORES[kind](tmp_path / name) for name in ("source", "target"))
    minute = int(clock.wall()) // MINUTE * MINUTE
    rows = [HistoryRow("task", f"{n:04}", MINUTE, minute, (n,)) for n in range(1100)]
    with contextlib.closing(open_broker(source)) as store:
        with_history(store, "history").keep_history(rows)
    with contextlib.closing(open_broker(target)) as store:
        with_history(store, "history").keep_history(
            [HistoryRow("task", "0007", MINUTE, minute, (100,))]
        )

    ends = []
    for crash in (f"{point}:1", f"{point}:2", ""):
        move = [sys.executable, "-m", "tidemill", "move", source, target]
        env = {**os.environ, "TIDEMILL_CRASH": crash}
        ends.append(subprocess.run(move, env=env, capture_output=True, timeout=60).returncode)

    assert ends == [-9, -9, 0]
    with contextlib.closing(open_broker(target)) as store:
        moved = with_history(store, "history").history("task", MINUTE)
    assert [row.counts[0] for row in moved] == [n + 100 * (n == 7) for n in range(1100)]
