"""``django://`` with real workers: the caller's transaction, wake-ups, and deaths of processes."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import SLACK, Place, eventually, open_place
from servers import django_on_sqlite

from tidemill.brokers.contract.inspection import Filter
from tidemill.core.job import Record, State

TASKS = """
@mill.task
def work(n):
    begin(); end(); return n

@mill.task
def hold(n):
    begin(); time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "django"
    folder.mkdir()
    url = django_on_sqlite(str(folder)) + "?poll=3600"  # so nothing is found by a poll
    with open_place(folder, url) as place:
        place.write(TASKS)
        yield place


@pytest.fixture
def atomic(place: Place) -> Any:
    """``transaction.atomic`` of the store's database."""
    from django.db import connections, transaction

    alias = alias_of(place)
    yield lambda: transaction.atomic(using=alias)
    connections[alias].close()


def alias_of(place: Place) -> str:
    return place.url.removeprefix("django://").partition("?")[0]


def states(place: Place) -> list[State]:
    return sorted(record.state for record in records(place))


def records(place: Place) -> list[Record]:
    return place.mill.broker.find(Filter(), 1000).records


def record_of(place: Place, job_id: str) -> Record:
    return place.mill.broker.get(job_id)


@pytest.mark.everyday
@pytest.mark.parametrize("options", [{}, {"key": "k"}, {"delay": 60}])
def test_a_rollback_or_a_savepoint_takes_back_its_own_job(
    place: Place, atomic: Any, options: dict[str, Any]
) -> None:
    # case D1
    def roll_back() -> None:
        with atomic():
            place.enqueue("work", 1, **options)
            raise KeyError

    with pytest.raises(KeyError):
        roll_back()
    assert states(place) == []
    with atomic():
        with pytest.raises(KeyError):
            roll_back()
        kept = place.enqueue("work", 2, **options)
    assert [record.envelope.id for record in records(place)] == [kept.id]


def test_an_enqueue_inside_atomic_is_one_statement(place: Place, atomic: Any) -> None:
    from django.db import connections
    from django.test.utils import CaptureQueriesContext

    with atomic():
        connection = connections[alias_of(place)]
        with CaptureQueriesContext(connection) as queries:
            place.enqueue("work", 1)
        assert len(queries) == 1
        with CaptureQueriesContext(connection) as queries:
            place.enqueue_many("work", [(n,) for n in range(200)])
        assert len(queries) == 1


def test_an_idle_worker_starts_a_job_when_the_transaction_commits(
    place: Place, atomic: Any
) -> None:
    # case D1
    worker = place.worker().wait_ready()
    eventually(lambda: place.mill.broker.owners(), "the worker on the list")
    with atomic():
        place.enqueue("work", 1)
        time.sleep(0.2)  # a worker that was told too early has looked by now
        assert place.ledger() == []
    place.wait_notes("end")
    assert worker.stop() == 0


def test_every_job_runs_once_in_several_processes(place: Place) -> None:
    place.enqueue_many("work", [(n,) for n in range(300)])
    place.drain("-p", "2")
    runs = Counter(line.id for line in place.ledger() if line.what == "begin")
    assert len(runs) == 300
    assert set(runs.values()) == {1}
    assert set(states(place)) == {State.SUCCEEDED}


@pytest.mark.everyday
def test_a_killed_worker_process_costs_its_job_one_attempt(place: Place) -> None:
    # case T9
    job = place.enqueue("hold", 1, retries=0)
    worker = place.worker(slots=1).wait_ready()
    [begun] = [line for line in eventually(place.ledger) if line.what == "begin"]
    os.kill(begun.pid, signal.SIGKILL)
    record = eventually(lambda: _in(place, job.id, State.FAILED), "the failure")
    assert "SIGKILL" in record.error
    worker.stop()


def test_another_worker_goes_on_when_a_whole_worker_dies(place: Place) -> None:
    # case T10: nothing is lost, and the other worker does not wait for the lease
    first = place.worker(slots=1).wait_ready()
    job = place.enqueue("hold", 1)
    eventually(place.ledger, "the first run")
    second = place.worker(slots=1).wait_ready()
    killed = time.monotonic()
    first.kill_everything()
    eventually(lambda: record_of(place, job.id).attempts, "the end of the attempt")
    assert time.monotonic() - killed < 1 + SLACK
    [attempt] = record_of(place, job.id).attempts
    assert "died" in attempt.error
    second.kill_everything()


def _in(place: Place, job_id: str, *wanted: State) -> Any:
    record = record_of(place, job_id)
    return record if record.state in wanted else None
