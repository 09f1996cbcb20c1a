"""huey on SQLite with fsync off (not safe against power loss): one consumer of two processes."""

import datetime
import os

from huey import SqliteHuey
from marks import mark
from processes import spawn_python

huey = SqliteHuey(
    "bench", filename=f"{os.environ['BENCH_TMP']}/huey.db", fsync=False, timeout=30, results=False
)


@huey.task()
def noop(stamp=0.0):
    mark(stamp)


def setup(tmp):
    """The tables are made on import."""


def enqueue_one(stamp=0.0):
    noop(stamp)


def enqueue_at(due):
    noop.schedule((due,), eta=datetime.datetime.fromtimestamp(due))


def start_workers():
    options = ("-w", "2", "-k", "process", "-q")
    return [spawn_python("huey.bin.huey_consumer", "systems.huey_sqlite.huey", *options)]


def stop():
    huey.storage.close()
