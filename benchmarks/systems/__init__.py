"""The systems under measurement, one small module each, behind one tiny interface.

A module is at once the application that workers import and the interface the driver calls. It finds
its folder in ``$BENCH_TMP`` and its server in ``$BENCH_REDIS_URL``, ``$BENCH_POSTGRES_URL`` or
``$BENCH_RABBITMQ_URL``, and defines:

- ``setup(tmp)``: connect, make tables; called once in the producer
- ``enqueue_one(stamp=0.0)``: one job, accepted when this returns
- ``enqueue_many(count)``: the fastest documented way to enqueue several, if there is one
- ``aenqueue_one(stamp=0.0)``: the same from asyncio, if there is one
- ``enqueue_at(due)``: one job for this epoch time, if delays are supported
- ``start_workers()``: a list of Popen
- ``start_workers_for_delays()``: the same, if another set-up is much better at delayed jobs
- ``unsettled()``: jobs without an outcome in the store yet, where outcomes are batched
- ``stop()``: close the producer's connections

What a system does not offer it leaves out, and the table shows a dash.
"""

from __future__ import annotations

from typing import NamedTuple


class System(NamedTuple):
    """What the runner must know of a system without importing it."""

    package: str
    set_up: str
    redis: bool = False
    postgres: bool = False
    rabbitmq: bool = False

    def module(self, name: str) -> str:
        """The module of this package that the name on the command line stands for."""
        return "systems." + name.replace("-", "_")


OURS = {
    "tidemill": System("tidemill", "LMDB, fsync, 2 processes x 8 threads"),
    "tidemill-redis": System("tidemill", "Redis, 2 processes x 8 threads", redis=True),
    "tidemill-postgres": System(
        "tidemill", "PostgreSQL, every commit synced, 2 processes x 8 threads", postgres=True
    ),
    "tidemill-rabbitmq": System("tidemill", "RabbitMQ, 2 processes x 8 threads", rabbitmq=True),
    "lmdb": System("lmdb", "bare LMDB: one put per durable commit, same disk"),
    "evalsha": System("redis", "bare EVALSHA round trips by redis-py", redis=True),
    "insert": System("psycopg", "bare INSERTs by psycopg, a commit each", postgres=True),
    "pika-floor": System(
        "pika", "bare messages by pika, confirmed; 2 consumers, an ack for each 100", rabbitmq=True
    ),
}
PEERS = {
    "procrastinate": System(
        "procrastinate", "PostgreSQL, 2 processes, 8 jobs at a time", postgres=True
    ),
    "huey-redis": System("huey", "Redis, 2 consumers x 4 threads", redis=True),
    "huey-sqlite": System("huey", "SQLite without fsync, 2 processes"),
    "dramatiq": System("dramatiq", "Redis, 2 processes x 16 threads", redis=True),
    "dramatiq-rabbitmq": System(
        "dramatiq", "RabbitMQ, unconfirmed, 2 processes x 8 threads", rabbitmq=True
    ),
    "dramatiq-confirms": System(
        "dramatiq", "RabbitMQ, confirmed, 2 processes x 8 threads", rabbitmq=True
    ),
    "taskiq": System("taskiq", "Redis list, 2 processes, 100 async tasks", redis=True),
    "celery": System("celery", "Redis, 2 solo workers (delayed jobs: 8 threads)", redis=True),
    "rq": System("rq", "Redis, 2 SimpleWorkers", redis=True),
    "flexiq": System("flexiq", "SQLite, prefork 2"),
}
FLOORS = {
    "tidemill": "lmdb",
    "tidemill-redis": "evalsha",
    "tidemill-postgres": "insert",
    "tidemill-rabbitmq": "pika-floor",
}
"""What a single enqueue cannot be faster than, measured in the same turns."""

SYSTEMS = OURS | PEERS
