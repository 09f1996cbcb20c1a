"""huey on Redis: two consumers of four threads, results off."""

import datetime
import os

from huey import RedisHuey
from marks import mark
from processes import spawn_python

huey = RedisHuey("bench", url=os.environ["BENCH_REDIS_URL"], results=False)


@huey.task()
def noop(stamp=0.0):
    mark(stamp)


def setup(tmp):
    """Nothing to prepare."""


def enqueue_one(stamp=0.0):
    noop(stamp)


def enqueue_at(due):
    noop.schedule((due,), eta=datetime.datetime.fromtimestamp(due))


def start_workers():
    consumer = ("huey.bin.huey_consumer", "systems.huey_redis.huey")
    return [spawn_python(*consumer, "-w", "4", "-k", "thread", "-q") for _ in range(2)]


def stop():
    huey.storage.close()
