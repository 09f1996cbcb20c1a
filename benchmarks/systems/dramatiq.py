"""dramatiq on Redis: two processes of sixteen threads; it keeps no results by default."""

import os
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from marks import mark
from processes import spawn_script

broker = RedisBroker(url=os.environ["BENCH_REDIS_URL"])
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(stamp=0.0):
    mark(stamp)


def setup(tmp):
    """Nothing to prepare."""


def enqueue_one(stamp=0.0):
    noop.send(stamp)


def enqueue_at(due):
    noop.send_with_options(args=(due,), delay=max(0, round((due - time.time()) * 1000)))


def start_workers():
    return [spawn_script("dramatiq", "systems.dramatiq:broker", "-p", "2", "-t", "16")]


def stop():
    broker.close()
