"""procrastinate on the same PostgreSQL: two worker processes of eight jobs at a time."""

import asyncio
import datetime as dt
import os

from marks import mark
from processes import spawn_python
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

URL = os.environ["BENCH_POSTGRES_URL"]

app = App(connector=PsycopgConnector(conninfo=URL))


@app.task(name="noop")
async def noop(stamp=0.0):
    mark(stamp)


producer = App(connector=SyncPsycopgConnector(conninfo=URL))


def setup(tmp):
    producer.open()
    producer.schema_manager.apply_schema()


def enqueue_one(stamp=0.0):
    producer.configure_task("noop").defer(stamp=stamp)


def enqueue_many(count):
    producer.configure_task("noop").batch_defer(*({} for _ in range(count)))


def enqueue_at(due):
    when = dt.datetime.fromtimestamp(due, dt.UTC)
    producer.configure_task("noop", schedule_at=when).defer(stamp=due)


def start_workers():
    return [spawn_python("systems.procrastinate") for _ in range(2)]


def stop():
    producer.close()


async def work():
    async with app.open_async():
        await app.run_worker_async(concurrency=8, listen_notify=True)


if __name__ == "__main__":
    asyncio.run(work())
