"""Kills in the middle of a step and of a move: each count is stored at most once."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Place
from servers import postgres_store, redis_url

from tidemill.brokers.contract.history import with_history
from tidemill.brokers.contract.history_rows import HOUR, MINUTE, HistoryRow
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock, new_id

STORES: dict[str, Callable[[Path], str]] = {
    "lmdb": lambda folder: f"lmdb://{folder}/store",
    "redis": lambda folder: f"{redis_url()}?prefix=t{new_id()}&owner_lease=3",
    "postgresql": lambda folder: postgres_store(f"t{new_id()}&owner_lease=3"),
}
"""Stores on servers that no test kills."""

"""Jobs that one step of a worker settles at most here."""

WORKER = """
import sys
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.history_rows import HOUR, MINUTE, HistoryRow
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Envelope, Outcome, Verdict
from tidemill.core.job import Owner

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
from tidemill.core.job import Owner

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
