"""RQ: two SimpleWorkers (no fork per job) with the scheduler, results off."""

import datetime
import os

from marks import mark
from processes import spawn_script
from redis import Redis
from rq import Queue

connection = Redis.from_url(os.environ["BENCH_REDIS_URL"])
queue = Queue("bench", connection=connection)


def noop(stamp=0.0):
    mark(stamp)


def setup(tmp):
    """Nothing to prepare."""


def enqueue_one(stamp=0.0):
    queue.enqueue(noop, stamp, result_ttl=0)


def enqueue_many(count):
    queue.enqueue_many([Queue.prepare_data(noop, result_ttl=0) for _ in range(count)])


def enqueue_at(due):
    when = datetime.datetime.fromtimestamp(due, datetime.UTC)
    queue.enqueue_at(when, noop, due, result_ttl=0)


def start_workers():
    url = os.environ["BENCH_REDIS_URL"]
    options = ("-u", url, "-w", "rq.worker.SimpleWorker", "--with-scheduler", "-q")
    return [spawn_script("rq", "worker", *options, "bench") for _ in range(2)]


def stop():
    connection.close()
