"""What the tests of the LMDB store share: jobs, threads, and a leader held up in its commit."""

from __future__ import annotations

import os
import threading
from typing import Any

from tidemill.brokers.base import Broker, Filter
from tidemill.brokers.lmdb.store import Store
from tidemill.clock import new_id
from tidemill.job import Envelope


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
        assert self.inside.wait(10)

    def hold(self, _: object) -> None:
        self.inside.set()
        assert self.open.wait(30)

    def release_when(self, pending: int) -> None:
        """Open once so many requests wait."""
        while len(self.store.commits.pending) < pending:
            os.sched_yield()
        self.open.set()
        self.thread.join(30)


class _Nothing:
    def __init__(self, *_: object) -> None: ...

    def finish(self) -> None: ...


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
        thread.join(30)
        assert not thread.is_alive()
