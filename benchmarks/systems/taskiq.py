"""taskiq on a Redis list: two processes of 100 async tasks, no result backend, no delays.

redis-py 8 times out blocking reads after 5 s by default, which restarts idle workers: off here.
"""

import asyncio
import os

from marks import mark
from processes import spawn_script
from taskiq_redis import ListQueueBroker

broker = ListQueueBroker(os.environ["BENCH_REDIS_URL"], socket_timeout=None)
_loop = None


@broker.task
async def noop(stamp: float = 0.0) -> None:
    mark(stamp)


def setup(tmp):
    global _loop
    _loop = asyncio.new_event_loop()
    asyncio.set_event_loop(_loop)
    _loop.run_until_complete(broker.startup())


async def aenqueue_one(stamp=0.0):
    await noop.kiq(stamp)


def enqueue_many(count):
    async def together():
        await asyncio.gather(*(noop.kiq() for _ in range(count)))

    _loop.run_until_complete(together())


def start_workers():
    options = ("--workers", "2", "--max-async-tasks", "100", "--no-parse", "--log-level", "ERROR")
    return [spawn_script("taskiq", "worker", "systems.taskiq:broker", *options)]


def stop():
    _loop.run_until_complete(broker.shutdown())
