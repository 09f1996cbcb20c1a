"""Deaths in the LMDB store: who notices, and what the dead leave behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from lmdb_desk import Process, job, until

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker
from tidemill.brokers.shared.liveness import WATCHED, neighbours
from tidemill.core.backoff import MESSAGE
from tidemill.core.envelope import Envelope
from tidemill.core.job import State
from tidemill.core.owner import Owner
from tidemill.core.scoreboard import Scoreboard

IDLE_CONSUMERS = """
    for n in range(12):
        broker.attach(Owner(id=f"idle{n}", name="idle", kind="consumer"))
    say("attached")
    sys.stdin.read()
"""
DYING_CONSUMER = """
    broker.attach(Owner(id="o", name="dead", kind="consumer"))
    [lease] = take("o", tasks=False, messages=True)
    say("got it")
    sys.stdin.read()
"""


def test_a_consumer_that_dies_is_seen_by_a_worker_that_waits(url: str, broker: LmdbBroker) -> None:
    # case Q7, law 5, law 6: however many consumers stand between them, none of which looks
    broker.put([Envelope(id="m", ttr=1000, retries=MESSAGE)])
    broker.attach(Owner(id="me", name="m"))
    with contextlib.ExitStack() as processes:
        processes.enter_context(Process(url, IDLE_CONSUMERS)).expect("attached")
        dying = processes.enter_context(Process(url, DYING_CONSUMER))  # the last in the ring
        dying.expect("got it")
        until(broker, "me", lambda: len(broker.owners()) == 14)
        broker.wait("me", 0)
        dying.kill()
        took = until(broker, "me", lambda: broker.get("m").state is State.READY)
        assert (
            took < 10
        )  # promised within one second; the disk may stall, and nobody looks so often
        assert len(broker.owners()) == 13
    record = broker.get("m")
    assert (record.attempt, record.attempts[0].error) == (1, "its consumer died")


@pytest.mark.parametrize(
    ("mine", "workers", "watched"),
    [
        (1, [], range(2, 2 + WATCHED)),
        (35, [], [36, 37, 38, 39, 40, 1, 2, 3]),
        (1, [1], range(2, 41)),
        (1, [1, 20], range(2, 41)),
        (1, [1, 20, 30], range(2, 31)),
        (30, [1, 20, 30], [*range(31, 41), *range(1, 21)]),
        (1, [1, 2, 3, 4], range(2, 2 + WATCHED)),
    ],
)
def test_each_owner_is_watched_by_two_workers(mine: int, workers: list[int], watched: Any) -> None:
    # law 5: every owner is watched by two workers, if there are two
    owners = [(n, n in workers) for n in range(1, 41)]
    assert neighbours(mine, owners) == list(watched)


def test_a_tick_removes_the_files_of_dead_owners(url: str, broker: LmdbBroker) -> None:
    # law 15: between any two steps a process may die
    broker.attach(Owner(id="me", name="m", board=os.path.join(broker.boards, "me")))
    folder = os.path.dirname(broker.boards)
    Scoreboard(os.path.join(broker.boards, "me"), 1).close()  # listed, and its maker may be gone
    left = ["owners/77.fifo", "owners/78.lock", "boards/struck"]
    for name in left:
        Path(folder, name).touch()
    starting = Scoreboard(os.path.join(broker.boards, "starting"), 1)
    starting.claim("starting")  # not on the list yet
    broker.tick()
    assert sorted(os.listdir(broker.boards)) == ["me", "starting"]
    assert os.listdir(f"{folder}/owners") == ["1.fifo"]
    assert [o.id for o in broker.owners()] == ["me"]
    starting.close()
    broker.tick()
    assert os.listdir(broker.boards) == ["me"]


def test_an_owner_in_another_object_of_the_process_is_alive(url: str, broker: LmdbBroker) -> None:
    broker.put([job(id="a")])
    other = open_broker(url)
    other.attach(Owner(id="o", name="w"))
    other.exchange(Step("o", want=Want(1)))
    broker.tick()
    assert [o.id for o in broker.owners()] == ["o"]
    assert broker.get("a").state is State.RUNNING
    other.close()
    assert broker.owners() == []
