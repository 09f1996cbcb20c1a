"""Celery on Redis: two solo workers, results ignored, gossip, mingle and heartbeat off."""

import datetime
import os

from celery import Celery
from marks import mark
from processes import spawn_python

app = Celery("bench", broker=os.environ["BENCH_REDIS_URL"])
app.conf.task_ignore_result = True


@app.task(name="noop")
def noop(stamp=0.0):
    mark(stamp)


def setup(tmp):
    """Nothing to prepare."""


def enqueue_one(stamp=0.0):
    noop.delay(stamp)


def enqueue_many(count):
    with app.producer_or_acquire() as producer:
        for _ in range(count):
            noop.apply_async(producer=producer)


def enqueue_at(due):
    noop.apply_async((due,), eta=datetime.datetime.fromtimestamp(due, datetime.UTC))


def _worker(name, *pool):
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "ERROR")
    app_and_name = ("-A", "systems.celery:app", "worker", "-n", f"{name}@bench")
    return spawn_python("celery", *app_and_name, *pool, *quiet)


def start_workers():
    return [_worker(name, "-P", "solo") for name in ("one", "two")]


def start_workers_for_delays():
    """A solo worker starts only some ten delayed jobs a second; threads do them all in time."""
    return [_worker("one", "-P", "threads", "-c", "8")]


def stop():
    app.close()
