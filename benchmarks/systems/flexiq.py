"""FlexiQ (Rust core) on SQLite: the prefork pool with two processes."""

import os
import time

from flexiq import Queue
from marks import mark
from processes import spawn_script

queue = Queue(db_path=f"{os.environ['BENCH_TMP']}/flexiq.db", workers=2, result_ttl=1)


@queue.task(name="noop")
def noop(stamp=0.0):
    mark(stamp)


def setup(tmp):
    """The tables are made on import."""


def enqueue_one(stamp=0.0):
    noop.delay(stamp)


def enqueue_many(count):
    queue.enqueue_many("noop", [()] * count)


async def aenqueue_one(stamp=0.0):
    await queue.aenqueue(task_name="noop", args=(stamp,))


def enqueue_at(due):
    noop.apply_async((due,), delay=max(0.0, due - time.time()))


def start_workers():
    return [spawn_script("flexiq", "worker", "--app", "systems.flexiq:queue", "--pool", "prefork")]


def stop():
    queue.close()
