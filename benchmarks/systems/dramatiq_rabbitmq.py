"""dramatiq on RabbitMQ: two processes of eight threads; by default it awaits no confirms."""

import os
import time

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from marks import mark
from processes import spawn_script

os.environ["dramatiq_queue_prefetch"] = "100"  # noqa: SIM112  # for the workers: 16 is slower

broker = RabbitmqBroker(
    url=os.environ["BENCH_RABBITMQ_URL"],
    confirm_delivery=os.environ.get("BENCH_CONFIRMS") == "1",
)
dramatiq.set_broker(broker)


@dramatiq.actor
def noop(stamp=0.0):
    mark(stamp)


def setup(tmp):
    """Queues are declared on first use."""


def enqueue_one(stamp=0.0):
    noop.send(stamp)


def enqueue_at(due):
    noop.send_with_options(args=(due,), delay=max(0, round((due - time.time()) * 1000)))


def start_workers():
    return [spawn_script("dramatiq", "systems.dramatiq_rabbitmq:broker", "-p", "2", "-t", "8")]


def stop():
    broker.close()
