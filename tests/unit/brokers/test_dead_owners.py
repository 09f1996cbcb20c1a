"""Owners that count as dead without a lease that runs out: brokers/shared/owners.py."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import NETWORK

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.registry import open_broker
from tidemill.brokers.shared.owners import Row
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner, Record, State
from tidemill.core.retry import ENDLESS
from tidemill.core.scoreboard import Scoreboard

pytestmark = pytest.mark.everyday

HERE = socket.gethostname()

MORTAL = r"""
import os, sys, time
from tidemill.brokers.contract.exchange import *
from tidemill.brokers.contract.features import *
from tidemill.brokers.contract.inspection import *
from tidemill.brokers.registry import open_broker
from tidemill.core.job import *
broker = open_broker(sys.argv[1])
_, _, me, kind, host, board = sys.argv
broker.attach(Owner(id=me, kind=kind, name="mortal", host=host, board=board))
want = Want(2, tasks=kind == "worker", messages=kind == "consumer")
leases = broker.exchange(Step(me, want=want)).leases
if os.environ.get("FORKS") and os.fork() == 0:
    os.setpgid(0, 0)
    os.write(1, b"-%d\n" % os.getpid())
    time.sleep(60)
    os._exit(0)
os.write(1, (" ".join(str(lease.token) for lease in leases) + "\n").encode())  # as one
sys.stdin.readline()
"""


@pytest.fixture(params=["redis", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return NETWORK[request.param](f"t{new_id()}") + "&owner_lease=3600"


@pytest.fixture
def broker(url: str) -> Iterator[Any]:
    with contextlib.closing(open_broker(url)) as broker:
        yield broker


class Mortal:
    """An owner in a process of its own."""

    def __init__(self, url: str, tmp: Path, kind: str = "worker", host: str = HERE, **env: str):
        self.id = f"m-{new_id()}"
        self.board = str(tmp / self.id)
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(MORTAL), url, self.id, kind, host, self.board],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            env={**os.environ, **env},
        )

    def hear(self) -> list[int]:
        return [int(word) for word in self.process.stdout.readline().split()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def mortal(url: str, tmp_path: Path) -> Iterator[Callable[..., Mortal]]:
    started: list[Mortal] = []

    def start(*args: str, **env: str) -> Mortal:
        started.append(Mortal(url, tmp_path, *args, **env))
        return started[-1]

    yield start
    for one in started:
        one.close()


def put(broker: Any, *ids: str, task: str = "t") -> None:
    broker.put([Envelope(id=job_id, task=task, ttr=600.0, retries=ENDLESS) for job_id in ids])


def get(broker: Any, job_id: str) -> Record:
    return broker.get(job_id)


def me(broker: Any) -> None:
    broker.attach(Owner(id="me", name="me", host=HERE))
    broker.exchange(Step("me"))
    broker.wait("me", 0)  # it watches who is there


def sleeps_until(broker: Any, holds: Callable[[], bool]) -> None:
    """Wait as an owner, until something holds; nothing but a death ends the sleep so soon."""
    began = time.monotonic()
    while not holds():
        broker.wait("me", 30)
        broker.exchange(Step("me"))
        assert time.monotonic() - began < 20, "only the tick found it"


@pytest.mark.parametrize("kind", ["worker", "consumer"])
@pytest.mark.parametrize("first", ["me", "it"])
def test_a_dead_owner_on_this_machine_is_known_at_once(
    broker: Any, mortal: Callable[..., Mortal], kind: str, first: str
) -> None:
    # laws 5, 6, case T10
    put(broker, "ran", "held", task="t" if kind == "worker" else "")
    if first == "me":
        me(broker)
    dying = mortal(kind)
    tokens = dying.hear()
    if kind == "worker":
        board = Scoreboard(dying.board, 4)
        board.claim(dying.id)
        board.start(0, tokens[0], 1, time.time(), 0.0)
    if first == "it":
        me(broker)
    threading.Timer(0.3, dying.kill).start()
    sleeps_until(broker, lambda: get(broker, "ran").state is State.READY)
    counted = 1 if kind == "consumer" else 0
    assert [get(broker, i).attempt for i in ("ran", "held")] == [1, counted]
    assert [get(broker, i).losses for i in ("ran", "held")] == [0, 0]
    why = "worker mortal died with its processes" if kind == "worker" else "its consumer died"
    assert get(broker, "ran").attempts[0].error == why
    assert [owner.id for owner in broker.owners()] == ["me"]
    assert not os.path.exists(dying.board)


def test_an_owner_that_died_unwatched_is_found_by_the_next_owner(
    broker: Any, mortal: Callable[..., Mortal]
) -> None:
    # law 5
    put(broker, "one")
    dying = mortal()
    dying.hear()
    dying.kill()
    assert get(broker, "one").state is State.RUNNING
    me(broker)
    assert get(broker, "one").state is State.READY


@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_an_owner_of_another_machine_is_left_to_its_lease(
    broker: Any, mortal: Callable[..., Mortal]
) -> None:
    # law 5: also when it shares a folder with this one
    put(broker, "one")
    dying = mortal("worker", "far")
    dying.hear()
    dying.kill()
    me(broker)
    assert broker._owners.reap() == 0
    assert get(broker, "one").state is State.RUNNING


def test_an_owner_that_is_slow_is_not_dead(broker: Any, mortal: Callable[..., Mortal]) -> None:
    # law 5
    put(broker, "one")
    slow = mortal()
    slow.hear()
    os.kill(slow.process.pid, signal.SIGSTOP)
    me(broker)
    assert broker._owners.reap() == 0
    assert get(broker, "one").state is State.RUNNING
    os.kill(slow.process.pid, signal.SIGCONT)


def test_a_forked_child_keeps_nobody_alive(broker: Any, mortal: Callable[..., Mortal]) -> None:
    # law 5, case Q12
    put(broker, "one", task="")
    dying = mortal("consumer", FORKS="1")
    child = -min(dying.hear() + dying.hear())  # the other is a token
    try:
        me(broker)
        dying.kill()
        sleeps_until(broker, lambda: get(broker, "one").state is State.READY)
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_owner_that_attached_again_is_not_buried(broker: Any) -> None:
    # law 4: it was found dead, and has attached since
    me(broker)
    put(broker, "one")
    broker.exchange(Step("me", want=Want(1)))
    number = broker._owners["me"].number
    broker.attach(Owner(id="me", name="me", host=HERE))
    put(broker, "two")
    broker.exchange(Step("me", want=Want(2)))
    broker._owners._bury(Row(Owner(id="me", host=HERE), number, -1.0))
    assert [owner.id for owner in broker.owners()] == ["me"]
    assert [get(broker, i).state for i in ("one", "two")] == [State.RUNNING] * 2
