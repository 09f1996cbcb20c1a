"""``django://`` while its PostgreSQL is killed and started again, under a worker and a producer."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import LIMIT, Place, Worker, eventually, open_place
from servers import Postgres, django_on_own_postgres

from tidemill import Tidemill
from tidemill.core.clock import new_id
from tidemill.core.job import State
from tidemill.errors import BrokerUnavailable

TASKS = """
@mill.task(retries=0)
def work(n):
    begin(); time.sleep(0.01); end(); return n
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with contextlib.closing(Postgres()) as server:
        yield server


@pytest.fixture
def place(server: Postgres, tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / f"away_{new_id()}"
    folder.mkdir()
    url = django_on_own_postgres(server, f"away_{new_id()}")
    with open_place(folder, f"{url}?patience=2") as place:
        place.write(TASKS)
        yield place
    if server.process is None:  # a test failed in between
        server.start()


class Producer:
    """Puts one job after another in a thread of its own, and notes the accepted ones.

    While the database is away, it tries again.
    """

    def __init__(self, place: Place) -> None:
        self.accepted: list[str] = []
        self.failed: list[BaseException] = []
        self._place = place
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Producer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with contextlib.suppress(BrokerUnavailable):
                    self.accepted.append(self._place.enqueue("work", len(self.accepted)).id)
        except BaseException as error:
            self.failed.append(error)


def restart(server: Postgres, worker: Worker) -> None:
    """Kill the server, wait until the worker has noticed, and start the server again."""
    noticed = worker.output.count("trying again")
    server.kill()
    worker.wait_line("trying again", noticed + 1)
    server.start()
    worker.wait_line("the broker is back", noticed + 1)


def check_all_ran(place: Place, worker: Worker, accepted: list[str]) -> None:
    """Each accepted job has succeeded after one run, in the same worker."""
    eventually(lambda: place.unfinished() == 0, "the end of all jobs")
    records = {record.envelope.id: record for record in place.records()}
    assert set(accepted) <= set(records)
    assert {record.state for record in records.values()} == {State.SUCCEEDED}
    runs = Counter(line.id for line in place.ledger() if line.what == "begin")
    assert set(runs) == set(records)
    assert set(runs.values()) == {1}
    assert worker.process.poll() is None


# case D4, law 1, law 4
def test_a_worker_goes_on_when_its_database_comes_back(server: Postgres, place: Place) -> None:
    # given a worker at work, and a producer
    worker = place.worker(processes=2).wait_ready()
    with Producer(place) as producer:
        place.wait_notes("end", 20)
        # when the server is killed, and starts again, twice
        for _ in range(2):
            before = len(producer.accepted)
            restart(server, worker)
            eventually(lambda n=before: len(producer.accepted) > n + 20, "more accepted jobs")
    # then nothing accepted is lost
    assert producer.failed == []
    check_all_ran(place, worker, producer.accepted)
    assert worker.stop() == 0


# case D4
def test_an_idle_worker_notices_that_its_database_came_back(server: Postgres, place: Place) -> None:
    # given an idle worker
    worker = place.worker().wait_ready()
    place.finish([place.enqueue("work", 1)])
    # when
    restart(server, worker)
    # then it takes the next job
    job = place.enqueue("work", 2)
    [record] = place.finish([job])
    assert record.state is State.SUCCEEDED
    assert worker.stop() == 0


def test_a_put_waits_for_its_patience_only(server: Postgres, place: Place) -> None:
    # given a database that is away
    place.enqueue("work", 1)
    server.kill()
    # then a put is refused once its patience is over
    with pytest.raises(BrokerUnavailable):
        place.enqueue("work", 2)
    # when the database comes back in time, then the put is accepted
    url = place.url.replace("patience=2", f"patience={LIMIT:g}")
    with Tidemill(url, allow_imports=["*"]) as patient, ThreadPoolExecutor() as threads:
        late = threads.submit(patient.enqueue, place.module.work.call(3))
        server.start()
        late.result(LIMIT)
    assert [record.state for record in place.records()] == [State.READY] * 2
