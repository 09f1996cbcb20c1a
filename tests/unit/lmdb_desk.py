"""For the tests of the LMDB store: jobs, threads, processes, and a leader that is held up."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from typing import Any

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine.store import Store
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease, Owner

PRELUDE = """
import sys, os, signal, time
from tidemill.brokers.contract.exchange import *
from tidemill.brokers.contract.features import *
from tidemill.brokers.contract.inspection import *
from tidemill.brokers.registry import open_broker
from tidemill.core.job import *
from tidemill.core.clock import new_id
broker = open_broker(sys.argv[1])
def say(text): print(text, flush=True)
def take(owner, count=1, **kinds):
    return broker.exchange(Step(owner, want=Want(count, **kinds))).leases
"""


def job(**fields: Any) -> Envelope:
    return Envelope(**{"id": new_id(), "task": "t", **fields})


def ids(broker: Broker) -> set[str]:
    return {r.envelope.id for r in broker.find(Filter(), 10_000).records}


class Gate:
    """Keeps the leader inside its transaction until the others have queued up behind it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.inside = threading.Event()
        self.open = threading.Event()
        self.thread = threading.Thread(target=lambda: store.commits.run(_Nothing, self.hold))
        self.thread.start()
        assert self.inside.wait(60)

    def hold(self, _: object) -> None:
        self.inside.set()
        assert self.open.wait(60)

    def release_when(self, pending: int) -> None:
        """Open once so many requests wait."""
        while len(self.store.commits.pending) < pending:
            os.sched_yield()
        self.open.set()
        self.thread.join(60)


class _Nothing:
    def __init__(self, *_: object) -> None: ...

    def finish(self) -> None: ...

    def committed(self) -> None: ...


def in_threads(calls: list[Any]) -> tuple[list[threading.Thread], list[Any]]:
    answers: list[Any] = [None] * len(calls)

    def run(n: int) -> None:
        try:
            answers[n] = calls[n]()
        except Exception as error:
            answers[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    return threads, answers


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def until(broker: Broker, owner: str, done: Any) -> float:
    """Wait as an owner does until something holds; seconds that took."""
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < 20
        broker.wait(owner, 20)
        broker.exchange(Step(owner, want=Want(0)))
    return time.monotonic() - start


class Process:
    """Another Python with a broker on the same store; ``expect`` reads a line it says."""

    def __init__(self, url: str, code: str, **env: str) -> None:
        command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), url]
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )

    def expect(self, line: str) -> None:
        assert self.popen.stdout.readline().strip() == line

    def tell(self, line: str = "") -> None:
        """Write a line to its standard input."""
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(10)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream:
                stream.close()


class Sleeper:
    """An owner in its wait, as far as the store can tell: no thread need really sleep."""

    def __init__(self, broker: LmdbBroker, name: str = "w", kind: str = "worker") -> None:
        self.broker = broker
        self.name = name
        broker.attach(Owner(id=name, kind=kind, name=name))
        self.member = broker._owners[name]

    def sleep(self, count: int = 4, queues: Sequence[str] = (), **want: Any) -> None:
        assert self.take(count, queues, **want) == []
        self.doze()

    def doze(self) -> None:
        """Enter the wait, of which it has not come back yet."""
        self.broker._store.wakeups.set_waiting(self.member.sleeper, True)

    def hinted(self) -> bool:
        """Whether something was written to its FIFO, which is empty then."""
        return bool(self.member.sleeper.drain())

    def exchange(self, **step: Any) -> list[Lease]:
        self.broker._store.wakeups.set_waiting(self.member.sleeper, False)
        return self.broker.exchange(Step(self.name, **step)).leases

    def take(self, count: int = 4, queues: Sequence[str] = (), **want: Any) -> list[str]:
        leases = self.exchange(want=Want(count, tuple(queues), **want))
        assert len(leases) <= count
        return [lease.open().id for lease in leases]


def commits(broker: LmdbBroker) -> int:
    return int(broker._store.env.info()["last_txnid"])
