"""A release that meets a PostgreSQL store of a newer version.

The newer release is a copy of this package with a migration and a function more.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Postgres

import tidemill
from tidemill.brokers.postgres.schema import VERSION
from tidemill.core.clock import new_id

APP = """
import os, time
from tidemill import Tidemill
from tidemill.brokers.postgres.schema import VERSION

mill = Tidemill(os.environ["STORE"])

@mill.task(retries=5)
def note(n):
    with open(os.environ["RAN"], "a") as file:
        file.write(f"{VERSION} {n}\\n")
    time.sleep(0.01)
"""

PRODUCE = """
import itertools, os, sys, time
from app import note
for n in itertools.count(int(sys.argv[1])):
    if len(sys.argv) > 2 and n == int(sys.argv[2]) or os.path.exists("stop"):
        break
    note.enqueue(n)
    print(n, flush=True)
    time.sleep(0.02)
"""

CONSUME = """
import sys
from app import mill
print("reads", flush=True)
while True:
    mill.queue("messages").get(timeout=1)
"""


class Build:
    """A release: the package in a folder of its own, and its programs."""

    def __init__(self, place: Path, url: str, above: int) -> None:
        self.version = VERSION + above
        self.release = f"0.{above}.7"
        self.url = url
        self._folder = place / f"build-{self.release}"
        self._env = {**os.environ, "PYTHONPATH": f"{self._folder}:{place}", "STORE": url}
        self._env |= {"RAN": str(place / "ran"), "TIDEMILL_URL": url}
        self._place = place
        source = Path(tidemill.__file__).parent
        shutil.copytree(source, self._folder / "tidemill", ignore=shutil.ignore_patterns("*.pyc"))
        number = self._folder / "tidemill/core/__init__.py"
        number.write_text(f"__version__ = {self.release!r}\n")
        broker = self._folder / "tidemill/brokers/postgres"
        for n in range(VERSION + 1, self.version + 1):
            table = f"CREATE TABLE tidemill.extra{n} (n int);\n"
            (broker / f"sql/migrations/{n:04}_extra.sql").write_text(table)
            text = f"CREATE FUNCTION tidemill.made_by{n}() RETURNS int LANGUAGE sql AS 'SELECT {n}'"
            (broker / f"sql/90_extra{n}.sql").write_text(f"{text};\n")

    def start(self, *command: str, **env: str) -> subprocess.Popen[str]:
        """``python …`` with this release."""
        return subprocess.Popen(
            [sys.executable, *command], cwd=self._place, env={**self._env, **env}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip

    def run(self, *command: str, **env: str) -> tuple[int, str]:
        """Its exit code and what it said."""
        process = self.start(*command, **env)
        said, _ = process.communicate(timeout=120)
        return process.returncode, said

    def migrate(self) -> tuple[int, str]:
        return self.run("-m", "tidemill", "migrate", self.url)

    def worker(self) -> subprocess.Popen[str]:
        # quiet: nobody reads its output while it runs, and it would wait when the pipe is full
        return self.start("-m", "tidemill", "worker", "app:mill", "-p", "1", "-c", "2", "--quiet")


@pytest.fixture
def server() -> Iterator[Postgres]:
    with contextlib.closing(Postgres("fsync=off")) as server:
        yield server


@pytest.fixture
def builds(tmp_path: Path, server: Postgres) -> list[Build]:
    """This release and the next one."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "ran").touch()
    url = f"{server.url()}?schema=t{new_id()}&owner_lease=15"
    return [Build(tmp_path, url, above) for above in range(2)]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ran(place: Path) -> list[tuple[int, int]]:
    """The version of the release that ran it, and its number, of each run."""
    rows = [line.split() for line in (place / "ran").read_text().splitlines()]
    return [(int(version), int(n)) for version, n in rows]


def until(place: Path, by: int, numbers: range, seconds: float = 180.0) -> None:
    """Wait until a release has run one of these jobs."""
    deadline = time.monotonic() + seconds
    while not any(version == by and n in numbers for version, n in ran(place)):
        assert time.monotonic() < deadline, f"version {by} ran none of these jobs"
        time.sleep(0.05)


def test_processes_of_an_older_release_are_refused_and_its_workers_leave(
    builds: list[Build], tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    # given a worker and a consumer of a release
    old, new = builds
    assert old.migrate()[0] == 0
    worker, consumer = old.worker(), old.start("-c", CONSUME)
    started += [worker, consumer]
    assert consumer.stdout.readline() == "reads\n"
    assert old.run("-c", PRODUCE, "0", "3")[0] == 0
    until(tmp_path, old.version, range(3))
    # when the next release migrates the store
    code, said = new.migrate()
    assert (code, said) == (0, f"the store went from version {VERSION} to {VERSION + 1}\n")
    # then they leave with a sentence that names both versions
    both = (
        rf"has version {VERSION + 1}, this tidemill needs version {VERSION}; upgrade tidemill here"
    )
    said, _ = worker.communicate(timeout=180)
    assert worker.returncode == 3, said  # case M13
    assert re.search(both + "; this worker stops", said), said
    said, _ = consumer.communicate(timeout=180)
    assert consumer.returncode == 1
    assert re.search(both, said), said
    # and nothing of that release begins
    code, said = old.run("-c", PRODUCE, "10", "11")
    assert code == 1
    assert re.search(both, said), said
    code, said = old.run("-m", "tidemill", "doctor")
    assert code == 1
    assert "upgrade tidemill here" in " ".join(said.split())
    # and workers of the next release go on
    started += [new.worker(), new.start("-c", PRODUCE, "10")]
    until(tmp_path, new.version, range(10, 10_000))
