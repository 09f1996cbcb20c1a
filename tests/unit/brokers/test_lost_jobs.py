"""A job that fails with its whole worker: the process that gives the worker up logs one line."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from broker_driver import LiveOwner, job
from harness import eventually
from servers import postgres_store, redis_url

from tidemill.brokers.registry import open_broker
from tidemill.client.context import mark_records
from tidemill.core.clock import new_id
from tidemill.core.job import State

pytestmark = pytest.mark.everyday("redis", "postgresql")

STORES: dict[str, Callable[[Path], str]] = {
    "lmdb": lambda folder: f"lmdb://{folder}/store",
    "redis": lambda folder: f"{redis_url()}?prefix=t{new_id()}",
    "postgresql": lambda folder: postgres_store(f"t{new_id()}"),
}

WORKER = """
import socket, sys
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.registry import open_broker
from tidemill.core.job import Owner

broker = open_broker(sys.argv[1])
broker.attach(Owner(id="w", kind="worker", name="w", host=socket.gethostname()))
leases = broker.exchange(Step("w", want=Want(30))).leases
print(len(leases), flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return STORES[request.param](tmp_path)


@pytest.fixture
def broker(url: str) -> Iterator[Any]:
    mark_records()
    broker = open_broker(url)
    yield broker
    broker.close()


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "tidemill.lost"]


def test_a_job_that_was_lost_too_often_has_a_line(
    broker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    given, other = job("mail", retries=1), job("mail", retries=5)
    broker.put([given, other])
    for _ in range(2):
        owner = LiveOwner(broker)
        while owner.take(2, ["mail"]):
            pass
        assert lines(caplog) == []
        broker.release(owner.id, None)
    [record] = lines(caplog)
    error = "lost with its worker: loss 2 of 2"
    assert record.levelname == "ERROR"
    assert record.getMessage() == f"app.work[{given.id}] failed (queue mail): {error}; not again"
    found: dict[str, Any] = vars(record)
    assert (found["tidemill_job_id"], found["tidemill_task"]) == (given.id, "app.work")
    assert found["tidemill_queue"] == "mail"
    assert broker.get(other.id).state is State.READY


def test_the_lines_of_a_killed_worker_are_bounded(
    broker: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = [job(retries=0) for _ in range(25)]
    broker.put(jobs)
    LiveOwner(broker)  # a neighbour, who learns of the death
    command = [sys.executable, "-c", WORKER, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"25\n"
        process.kill()
    ids = [one.id for one in jobs]

    def have_failed() -> bool:
        broker.tick()
        return all(broker.get(job_id).state is State.FAILED for job_id in ids)

    eventually(have_failed)
    shown = [record.getMessage() for record in lines(caplog)]
    assert len(shown) == 21
    for text in shown[:20]:
        assert text.endswith(
            " failed (queue default): lost with its worker: loss 1 of 1; not again"
        )
        assert text.partition("[")[2].partition("]")[0] in ids
    assert shown[20] == "5 more jobs failed: lost with their worker"
