"""Leases of owners on other machines: who is slow, cut off or gone (brokers/shared/owners.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from postgres_desk import connect, job, start, take
from servers import postgres_url
from servers.base import await_stop

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step
from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.postgres.connections import Connections
from tidemill.brokers.shared.owners import Row
from tidemill.core.clock import new_id
from tidemill.core.job import Command, Owner, State
from tidemill.core.retry import RetryPolicy

LEASE = 2.0

WORKER = """
broker.attach(Owner(id=sys.argv[2], kind=sys.argv[3], name="mortal", host=sys.argv[4],
                    board=sys.argv[5]))
say(" ".join(str(lease.token) for lease in take(sys.argv[2], 2, messages=True)))
sys.stdin.readline()
say(repr(broker.exchange(Step(sys.argv[2])).commands))
sys.stdin.readline()
"""


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    lease = getattr(request, "param", LEASE)
    return f"{postgres_url()}?schema=t{new_id()}&migrate=1&owner_lease={lease:g}"


class Mortal:
    """An owner in a process of its own; with ``far`` it shares nothing with us but the server."""

    def __init__(
        self, url: str, tmp_path: Path, kind: str = "worker", far: bool = False, board: bool = True
    ) -> None:
        self.id = f"m-{new_id()[:20]}"
        self.board = str(tmp_path / self.id) if board else ""
        self.process: subprocess.Popen[str] = start(
            url, WORKER, self.id, kind, "far" if far else "here", self.board,
            temp=tmp_path if far else None,
        )  # fmt: skip
        self.tokens = [int(word) for word in self.hear().split()]

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def say(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def sleeps_until(broker: Broker, holds: object, seconds: float = 20.0) -> float:
    """Wait as an owner, until something holds; how long that took."""
    began = time.monotonic()
    while not holds():  # type: ignore[operator]
        assert time.monotonic() - began < seconds, "it does not come about"
        broker.wait("me", 20)
        broker.exchange(Step("me"))
    return time.monotonic() - began


def test_a_far_owner_is_given_up_after_its_lease(broker: Broker, url: str, tmp_path: Path) -> None:
    # laws 5, 6: a machine that vanished leaves no witness
    broker.put([job(id="one"), job(id="two")])
    time.sleep(LEASE)  # the server has been there for a lease
    mortal = Mortal(url, tmp_path, far=True, board=False)
    try:
        broker.attach(Owner(id="me", name="me", host="here"))
        asked = time.monotonic()
        mortal.say()
        assert mortal.hear() == "[]"
        mortal.kill()
        assert broker._owners.reap() == 0 or time.monotonic() > asked + LEASE
        took = sleeps_until(broker, lambda: broker.get("one").state is State.READY)
        assert took < 15
        assert time.monotonic() - asked > 0.75 * LEASE
    finally:
        mortal.close()
    assert (broker.get("one").losses, broker.get("one").attempt) == (1, 0)


def test_an_owner_that_renews_its_lease_before_it_is_given_up_keeps_its_jobs(
    broker: PostgresBroker, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 5
    broker.put([job(id="one")])
    mortal = Mortal(url, tmp_path, far=True, board=False)
    bury = broker._owners._bury

    buried: list[bool] = []

    def renew_and_bury(row: Row) -> bool:
        mortal.say()
        assert mortal.hear() == "[]"
        buried.append(bury(row))
        return buried[-1]

    monkeypatch.setattr(broker._owners, "_bury", renew_and_bury)
    try:
        deadline = time.monotonic() + 20
        while not buried:
            assert time.monotonic() < deadline
            broker._owners.reap()
            time.sleep(0.1)
        assert buried == [False]
        assert [owner.id for owner in broker.owners()] == [mortal.id]
        assert broker.get("one").state is State.RUNNING
    finally:
        mortal.close()


def _cut(url: str) -> None:
    with connect(url, autocommit=True) as conn:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'tidemill' AND pid <> pg_backend_pid()"
        )


def test_a_far_owner_that_was_cut_off_has_its_lease_to_come_back(
    broker: Broker, url: str, tmp_path: Path
) -> None:
    # law 5
    broker.put([job(id="one")])
    mortal = Mortal(url, tmp_path, far=True)
    try:
        os.kill(mortal.process.pid, signal.SIGSTOP)
        await_stop(mortal.process.pid)
        _cut(url)
        assert broker._owners.reap() == 0
        deadline = time.monotonic() + 20
        while not broker._owners.reap():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(mortal.process.pid, signal.SIGCONT)
        mortal.say()
        assert mortal.hear() == repr([Command("lost")])
    finally:
        mortal.close()
    assert broker.get("one").state is State.READY


@pytest.mark.parametrize("url", [4.0], indirect=True)
def test_a_server_that_was_silent_leaves_owners_a_lease_to_come_back(
    broker: PostgresBroker, url: str, tmp_path: Path
) -> None:
    # law 5: given a far owner whose lease has run out while nobody heard of the server
    broker.put([job(id="one")])
    mortal = Mortal(url, tmp_path, far=True)
    try:
        time.sleep(4.5)
        # when the server answers again
        assert broker._owners.reap() == 0
        # then the owner has the time to renew its lease
        mortal.say()
        assert mortal.hear() == "[]"
        assert broker._owners.reap() == 0
    finally:
        mortal.close()


def test_a_forked_child_may_go_on_with_connections_of_its_own(broker: Broker) -> None:
    # case Q8
    broker.attach(Owner(id="me", name="me", host="here"))
    broker.put([job(id="one")])
    [lease] = take(broker, "me")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            broker.put([job(id="child")])
            code = 0 if broker.get("one") is not None else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert broker.exchange(Step("me", touch=[(lease.token, 0.0)])).touched == [True]
    assert broker.get("child") is not None


@pytest.mark.parametrize("brisk", [True, False])
def test_only_a_brisk_call_does_not_wait_for_a_server_that_is_away(
    broker: PostgresBroker, worker: Owner, monkeypatch: pytest.MonkeyPatch, brisk: bool
) -> None:
    # given an owner whose loss fails its job
    broker.put([job(id="a", retries=RetryPolicy(limit=0))])
    take(broker, "w")
    waits: list[float] = []
    run = Connections.run

    def noted(connections: Connections, work: Any, *, patience: float = 0.0) -> Any:
        waits.append(patience)
        return run(connections, work, patience=patience)

    # when it is given up: its jobs are read, it is struck, and the failed job is read
    with monkeypatch.context() as noting:
        noting.setattr(Connections, "run", noted)
        assert broker._owners._give_back("w", None, None, brisk=brisk) == 1
    # then
    assert waits == [0.0 if brisk else 10.0] * 3
    assert broker.get("a").state is State.FAILED
