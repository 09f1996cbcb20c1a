"""A real worker on a PostgreSQL server whose disk is full."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import fill_disk, mounted
from harness import Place, check_counters, eventually, open_place, runs_of
from servers import Postgres

from tidemill.core.job import State

APP = """
@mill.task
def give(size):
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()
    return os.urandom(size)
"""


@pytest.fixture
def disk() -> Iterator[Path]:
    """A disk that the user of the server can reach, as it cannot reach ``tmp_path``."""
    folder = Path(tempfile.mkdtemp(prefix="tidemill-test-disk-"))
    folder.chmod(0o755)
    try:
        with mounted(folder / "disk", "size=300m") as disk:
            yield disk
    finally:
        (folder / "disk").rmdir()
        folder.rmdir()


@pytest.fixture
def server(disk: Path) -> Iterator[Postgres]:
    server = Postgres("min_wal_size=32MB", above=disk)
    try:
        yield server
    finally:
        server.close()


def test_a_worker_waits_for_room_and_then_settles_all(
    tmp_path: Path, disk: Path, server: Postgres
) -> None:
    # laws 1, 3, 16
    (tmp_path / "p").mkdir()
    with open_place(tmp_path / "p", f"{server.url()}?migrate=1") as place:
        place.write(APP)
        worker = place.worker(slots=20).wait_ready()
        jobs = place.enqueue_many("give", [(size,) for size in [10, 100_000] * 40])
        place.wait_notes("begin", 20)
        other = fill_disk(disk)
        # when jobs end on a full disk
        (place.path / "go").touch()
        worker.wait_line("the worker keeps the outcome of ended jobs until there is room")
        # then the worker offers them again about once a second, and all of a step at once
        before, began = refusals(server), time.monotonic()
        time.sleep(3)
        assert refusals(server) - before <= 10 * (time.monotonic() - began)
        assert unfinished(place) <= {State.RUNNING, State.READY}
        # and settles them when there is room
        other.unlink()
        records = place.finish(jobs)
        assert {(r.state, r.attempt) for r in records} == {(State.SUCCEEDED, 1)}
        eventually(lambda: "the store has room again" in worker.output, "the log says so")
        assert [len(job.result(0)) for job in jobs[::2]] == [10] * 40
        assert len(worker.troubles()) < 10
        assert worker.stop() == 0
        check_counters(place)
        assert {len(runs) for runs in runs_of(place.ledger()).values()} == {1}


def refusals(server: Postgres) -> int:
    return server.log.read_text(errors="replace").count("No space left on device")


def unfinished(place: Place) -> set[State]:
    return {record.state for record in place.records()} - {State.SUCCEEDED}
