"""dramatiq on RabbitMQ as before, but each job is confirmed before the call returns."""

import os

os.environ["BENCH_CONFIRMS"] = "1"

from systems.dramatiq_rabbitmq import *  # noqa: F403
