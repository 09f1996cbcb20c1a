"""A store that loses its latest steps while workers live: an old image takes its place."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import LIMIT, Place, check_counters, eventually, open_place, runs_of
from servers import Postgres, Redis, Server
from servers.http import JobServer

from tidemill.core.envelope import LimitSettings
from tidemill.core.job import State

APP = """
@mill.task
def waits(n):
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()
    return n
"""


@contextlib.contextmanager
def _redis() -> Iterator[tuple[Server, str]]:
    with contextlib.closing(Redis(durable=True)) as server:
        yield server, f"{server.url}?patience=20"


@contextlib.contextmanager
def _postgresql() -> Iterator[tuple[Server, str]]:
    with contextlib.closing(Postgres()) as server:
        yield server, f"{server.url()}?patience=20&migrate=1"


@contextlib.contextmanager
def _http() -> Iterator[tuple[Server, str]]:
    with contextlib.closing(JobServer("--quiet")) as server:
        yield server, f"{server.url}?patience=20"


KINDS: dict[str, Callable[[], contextlib.AbstractContextManager[tuple[Server, str]]]] = {
    "redis": _redis,
    "postgresql": _postgresql,
    "http": _http,
}


@pytest.fixture(params=list(KINDS))
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Place]]:
    (tmp_path / "p").mkdir()
    with KINDS[request.param]() as (server, url), open_place(tmp_path / "p", url) as place:
        place.write(APP)
        yield server, place


@contextlib.contextmanager
def down(server: Server) -> Iterator[None]:
    """The server is dead for the time of a block."""
    server.kill()
    yield
    server.start()  # type: ignore[attr-defined]  # each of these has it


def copy(old: Path, new: Path) -> None:
    subprocess.run(["cp", "-a", str(old), str(new)], check=True)


def image(server: Server, to: Path) -> None:
    with down(server):
        copy(server.path, to)


def restore(server: Server, to: Path) -> None:
    with down(server):
        shutil.rmtree(server.path)
        copy(to, server.path)


def test_a_worker_settles_again_what_its_store_has_forgotten(
    kept: tuple[Server, Place], tmp_path: Path
) -> None:
    # laws 3, 4: no place of a limit stays taken, and no job stays "running"
    server, place = kept
    worker = place.worker(slots=4).wait_ready()
    place.mill.broker.set_limit("default", LimitSettings(concurrency=4), queue=True)  # type: ignore[attr-defined]
    jobs = place.enqueue_many("waits", [(n,) for n in range(12)])
    place.wait_notes("begin", 4)
    image(server, tmp_path / "image")
    (place.path / "go").touch()
    place.finish(jobs)
    # when
    restore(server, tmp_path / "image")
    # then
    worker.wait_line("the store has lost its latest steps: 4 verdicts are handed in again")
    records = place.finish(jobs)
    assert {(r.state, r.attempt, r.losses) for r in records} == {(State.SUCCEEDED, 1, 0)}
    runs = [len(found) for found in runs_of(place.ledger()).values()]
    assert sorted(runs) == [1] * 4 + [2] * 8  # the store had not heard of the others at all
    eventually(lambda: {row.running for row in place.mill.broker.limits()} == {0})  # type: ignore[attr-defined]
    check_counters(place)
    assert [job.result(LIMIT) for job in jobs] == list(range(12))
    assert worker.stop() == 0
