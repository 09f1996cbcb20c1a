"""Deaths in the LMDB store: who notices, what that costs, and what the dead leave behind."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import eventually
from lmdb_desk import Process, Sleeper, in_threads, job, join, until

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine.wakeup import WakeUps
from tidemill.brokers.registry import open_broker
from tidemill.brokers.shared.liveness import WATCHED, Liveness, neighbours
from tidemill.brokers.shared.owners import Row
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner, State
from tidemill.core.retry import MESSAGE
from tidemill.core.scoreboard import Scoreboard
from tidemill.errors import BrokerUnavailable

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


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """This process cannot open a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        highest = max(map(int, os.listdir("/dev/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


def test_opening_and_closing_gathers_nothing(url: str) -> None:
    # law 15: with owners elsewhere to watch, every time
    def resources() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def grown() -> list[int]:
        return [n - m for n, m in zip(resources(), before, strict=True) if n > m]

    def use() -> None:
        with Tidemill(url) as mill:
            assert mill.queue("q").get(timeout=0) is None

    with Process(url, IDLE_CONSUMERS) as others:
        others.expect("attached")
        use()
        before = resources()
        for _ in range(50):
            use()
        # the writer threads of closed stores may still be ending
        eventually(lambda: not grown(), "no more threads and descriptors than before")
        assert len(os.listdir(url.removeprefix("lmdb://") + "/owners")) == 12


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


def die(broker: LmdbBroker) -> None:
    """Drop the descriptors that show that the owners of this object live."""
    broker._owners._liveness.after_fork_child()


def attach_with(
    broker: LmdbBroker, owner: str, monkeypatch: pytest.MonkeyPatch, look: Callable[[], Any]
) -> None:
    """Attach an owner; ``look`` runs in another thread before the commit."""
    ring_others = WakeUps.ring_others

    def ring(self: WakeUps, number: int) -> None:
        ring_others(self, number)
        threads, answers = in_threads([look])
        join(threads)
        assert answers == [[]]

    with monkeypatch.context() as patch:
        patch.setattr(WakeUps, "ring_others", ring)
        broker.attach(Owner(id=owner, name=owner))


def test_a_worker_that_wakes_before_the_commit_of_a_new_worker_watches_it(
    url: str, broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 5: given a sleeper whose look after the hint comes before the commit
    broker.put([job(id="a")])
    broker.attach(Owner(id="me", name="m"))
    broker.wait("me", 0)
    with contextlib.closing(open_broker(url)) as other:
        attach_with(other, "new", monkeypatch, lambda: broker.wait("me", 20))
        assert len(other.exchange(Step("new", want=Want(1))).leases) == 1
        broker.exchange(Step("me", want=Want(0)))
        # when
        death = threading.Timer(0.2, die, [other])
        death.start()
        took = until(broker, "me", lambda: broker.get("a").state is State.READY)
        # then
        assert took < 10  # without a watch the sleep ends after 20 s
        death.join()


def test_a_death_that_cannot_be_handled_at_once_is_handled_soon(
    url: str, broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 5: given a worker that died before anybody watched it, while another process writes
    broker.put([job(id="a")])
    broker.attach(Owner(id="me", name="m"))
    broker.wait("me", 0)
    reap, tries = broker._owners.reap, list[int]()

    def busy() -> int:
        tries.append(1)
        if len(tries) == 1:
            raise BrokerUnavailable("another process writes")
        return reap()

    monkeypatch.setattr(broker._owners, "reap", busy)
    with contextlib.closing(open_broker(url)) as other:
        other.attach(Owner(id="new", name="n"))
        assert len(other.exchange(Step("new", want=Want(1))).leases) == 1
        die(other)
        # when
        took = until(broker, "me", lambda: broker.get("a").state is State.READY)
        # then
        assert took < 10  # without the next look the sleep ends after 20 s
        assert len(tries) == 2


def test_a_worker_sees_that_one_owner_took_the_place_of_another(
    url: str, broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a worker whose latest look came between the two commits of an attach
    broker.attach(Owner(id="me", name="m"))
    broker.wait("me", 0)
    with contextlib.closing(open_broker(url)) as other:
        other.attach(Owner(id="old", name="o"))
        broker.wait("me", 0)
        attach_with(other, "new", monkeypatch, lambda: broker.wait("me", 0))
        # when
        other.detach("old")
        broker.wait("me", 0)
        broker.wait("me", 0)
        # then it watches the new owner
        assert broker._owners["me"].watched == [other._owners["new"].number]
        # and sleeps, as the end of the old owner is no news
        start = time.monotonic()
        assert broker.wait("me", 0.2) == []
        assert time.monotonic() - start > 0.19


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


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "lives after all"])
def test_an_owner_that_only_seemed_dead_is_not_buried(
    url: str,
    broker: LmdbBroker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    leaves: bool,
) -> None:
    # law 5: given an owner whose FIFO was cleared away
    board = os.path.join(broker.boards, "o")
    with contextlib.closing(open_broker(url)) as other:
        scoreboard = Scoreboard(board, 1)
        scoreboard.claim("o")
        other.attach(Owner(id="o", name="o", board=board))
        Path(other._owners._liveness.path(other._owners["o"].number)).unlink()
        is_dead = broker._owners._is_dead

        def look(row: Row, rows: Sequence[Row]) -> bool:
            dead = is_dead(row, rows)
            if leaves:
                other.detach("o")
            else:
                other._owners._liveness.keep()
            return dead

        # when it leaves, or makes its FIFO anew, right after the look
        monkeypatch.setattr(broker._owners, "_is_dead", look)
        # then
        assert broker.reap() == 0
        assert not caplog.records
        assert [owner.id for owner in broker.owners()] == ([] if leaves else ["o"])
        assert os.path.exists(board)
        scoreboard.close()


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


def test_a_board_swept_before_it_was_claimed_is_made_again(broker: LmdbBroker) -> None:
    path = os.path.join(broker.boards, "me")
    board = Scoreboard(path, 2)
    broker.tick()
    assert not os.path.exists(path)
    board.claim("me")
    board.start(1, 5, 1, 10.0, 0.0)
    broker.tick()
    assert [row.token for row in Scoreboard(path, 2).running(0, 2, [5])] == [5]


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


@pytest.mark.parametrize("lease", [0.0, 30.0])
@pytest.mark.parametrize("where", ["hold", "member"])
def test_a_failed_attach_leaves_nothing_open(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch, where: str, lease: float
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    broker.attach(Owner(id="here", name="w"))
    before = len(os.listdir("/dev/fd"))
    with monkeypatch.context() as patch:
        if where == "member":
            patch.setattr("tidemill.brokers.lmdb.owners.LocalOwner", full)
        elif lease:
            patch.setattr(WakeUps, "take", full)
        else:
            patch.setattr(Liveness, "hold", full)
        for n in range(5):
            with pytest.raises(OSError, match="Too many"):
                broker.attach(Owner(id=f"no{n}", name="w", lease=lease))
    assert len(os.listdir("/dev/fd")) <= before + 1  # the way to one FIFO is kept, for hints
    broker.tick()
    there = [owner.id for owner in broker.owners() if not owner.lease]
    assert there == ["here"]


@pytest.mark.parametrize("due", [False, True], ids=["for jobs", "for a time"])
def test_a_sleeper_that_one_producer_cannot_reach_is_hinted_by_the_next(
    broker: LmdbBroker, due: bool
) -> None:
    # given: a sleeper, and a producer that cannot open its FIFO
    worker = Sleeper(broker)
    worker.sleep()
    path = Path(broker._store.wakeups._folder.path) / f"{worker.member.sleeper.slot}.fifo"
    aside = path.rename(f"{path}.aside")
    path.touch()
    first, second = (job(delay=60), job(delay=30)) if due else (job(), job())
    broker.put([first])
    assert not worker.hinted()
    # when
    aside.rename(path)
    broker.put([second])
    # then
    assert worker.hinted()


def test_a_producer_without_a_free_descriptor_hints_all_sleepers(broker: LmdbBroker) -> None:
    workers = [Sleeper(broker, name) for name in ("v", "w")]
    for worker in workers:
        worker.sleep(1)
    # when
    with no_free_descriptor():
        broker.put([job(), job()])
    # then
    assert all(worker.hinted() for worker in workers)
