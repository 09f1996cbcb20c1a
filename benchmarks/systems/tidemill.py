"""tidemill at its defaults: LMDB with fsync, history kept, 2 processes x 8 threads."""

import os

from marks import mark
from processes import spawn_python

from tidemill import Tidemill

mill = Tidemill(os.environ.get("BENCH_URL") or f"lmdb://{os.environ['BENCH_TMP']}/mill")


@mill.task(name="noop")
def noop(stamp: float = 0.0) -> None:
    mark(stamp)


def setup(tmp):
    """The store is made on first use."""


def enqueue_one(stamp=0.0):
    noop.enqueue(stamp)


def enqueue_many(count):
    mill.enqueue_many(noop.call() for _ in range(count))


async def aenqueue_one(stamp=0.0):
    await noop.aenqueue(stamp)


def enqueue_at(due):
    noop.using(at=due).enqueue(due)


def start_workers():
    return [spawn_python("tidemill", "worker", "systems.tidemill:mill", "-p", "2", "-c", "8")]


def unsettled():
    return sum(queue.ready + queue.running for queue in mill.broker.stats())


def stop():
    mill.close()
