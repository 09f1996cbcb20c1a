"""Releases that meet a PostgreSQL store of another version, and migrate it in their order.

The newer releases are copies of this package with a migration and a function more.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from harness import eventually
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

    def __init__(self, place: Path, url: str, above: int, release: str = "") -> None:
        self.version = VERSION + above
        self.release = release or f"0.{above}.7"
        self.url = url
        self._folder = place / f"build-{self.release}"
        self._env = {**os.environ, "PYTHONPATH": f"{self._folder}:{place}", "STORE": url}
        self._env |= {"RAN": str(place / "ran"), "TIDEMILL_URL": url}
        self._place = place
        source = Path(tidemill.__file__).parent
        shutil.copytree(source, self._folder / "tidemill", ignore=shutil.ignore_patterns("*.pyc"))
        number = self._folder / "tidemill/core/version.py"
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


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with contextlib.closing(Postgres("fsync=off")) as server:
        yield server


@pytest.fixture
def schema() -> str:
    return f"t{new_id()}"


@pytest.fixture
def url(server: Postgres, schema: str) -> str:
    return f"{server.url()}?schema={schema}&owner_lease=15"


@pytest.fixture
def builds(tmp_path: Path, url: str) -> list[Build]:
    """This release, the next one, and the one after that."""
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "ran").touch()
    return [Build(tmp_path, url, above) for above in range(3)]


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


def stored(server: Postgres, schema: str) -> tuple[int, list[str]]:
    """The version of a store, and the functions that only newer releases have."""
    with psycopg.connect(server.url()) as conn:
        [(version,)] = conn.execute(f"SELECT version FROM {schema}.meta".encode()).fetchall()
        found = conn.execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = %s::regnamespace "
            "AND proname LIKE 'made_by%%' ORDER BY 1",
            [schema],
        ).fetchall()
    return version, [name for (name,) in found]


def test_processes_of_an_older_release_are_refused_and_its_workers_leave(
    builds: list[Build], tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    # given a worker and a consumer of a release
    old, new, _ = builds
    assert old.migrate()[0] == 0
    worker, consumer = old.worker(), old.start("-c", CONSUME)
    started += [worker, consumer]
    assert consumer.stdout is not None
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


def test_the_doctor_names_workers_of_another_release(
    builds: list[Build], tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    old = builds[0]
    other = Build(tmp_path, old.url, 0, release="0.0.8")

    def warned(of: Build) -> tuple[str, str] | None:
        code, said = of.run("-m", "tidemill", "doctor", "--json")
        assert code == 0, said
        found = {c["check"]: c for c in json.loads(said)["checks"] if c["status"] == "warn"}
        return (
            (found["versions"]["message"], found["versions"]["advice"])
            if "versions" in found
            else None
        )

    # given a worker of a release
    assert old.migrate()[0] == 0
    started.append(old.worker())
    assert old.run("-c", PRODUCE, "0", "1")[0] == 0
    until(tmp_path, old.version, range(1))
    assert warned(old) is None
    # then the doctor of another release names it
    said = warned(other)
    assert said is not None
    assert said[0].startswith(
        f"all workers run another release than this command, {other.release}: "
    )
    assert f"{old.release} (1: " in said[0]
    assert said[1] == f"restart them with tidemill {other.release}"
    # and the doctor of each release names workers of both releases
    started.append(other.worker())
    eventually(lambda: "different releases" in (warned(old) or ("",))[0], "both workers")
    for build in (old, other):
        said = warned(build)
        assert said is not None
        assert re.search(rf"different releases: {old.release} \(1.*; {other.release} \(1", said[0])
        assert said[1].startswith(f"restart the others with tidemill {other.release}")


def test_a_newer_release_asks_for_a_migration_or_makes_it(
    builds: list[Build], url: str, server: Postgres, schema: str
) -> None:
    # given a store of the release before
    old, new, _ = builds
    assert old.migrate()[0] == 0
    # when a newer release opens it
    code, said = new.run("-c", PRODUCE, "0", "1")
    # then it says what to do
    assert code == 1
    assert f"has version {VERSION}, this tidemill needs version {VERSION + 1}" in said
    assert "run: tidemill migrate URL" in said
    # and with migrate=1 it does that itself
    code, said = new.run("-c", PRODUCE, "0", "1", STORE=f"{url}&migrate=1")
    assert code == 0, said
    assert stored(server, schema)[0] == VERSION + 1
    # and the release before is refused, and changes nothing
    code, said = old.run("-c", PRODUCE, "1", "2", STORE=f"{url}&migrate=1")
    assert code == 1
    assert f"makes version {VERSION} and never goes back: upgrade tidemill here" in said
    assert stored(server, schema) == (VERSION + 1, [f"made_by{VERSION + 1}"])


@pytest.mark.parametrize("again", range(3))
def test_two_releases_that_migrate_at_once_leave_the_newer_one(
    builds: list[Build], server: Postgres, schema: str, again: int
) -> None:
    # given a store of the oldest release, or none
    old, new, newest = builds
    if again:
        assert old.migrate()[0] == 0
    # when all migrate at once
    order = [new, newest, old, newest, new, old]
    migrate = ("-m", "tidemill", "migrate", schema_url(server, schema))
    processes = [build.start(*migrate) for build in order[again:]]
    results = [(p.communicate(timeout=120)[0], p.returncode) for p in processes]
    # then the newest has won, and the others were done before it or refused
    newer = [f"made_by{VERSION + n}" for n in (1, 2)]
    assert stored(server, schema) == (VERSION + 2, newer), results
    for build, (said, code) in zip(order[again:], results, strict=True):
        if code:
            assert build is not newest
            assert "never goes back: upgrade tidemill here" in said


def schema_url(server: Postgres, schema: str) -> str:
    """A transaction that reads what it saw first would see the store of before the lock."""
    strict = "options=-c%20default_transaction_isolation%3Dserializable"
    return f"{server.url()}?schema={schema}&patience=30&{strict}"
