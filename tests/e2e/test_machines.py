"""Workers on several machines, and one of them is cut off."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import LIMIT, Place, Worker, check_counters, open_place
from servers import Machine, Postgres, Redis, Server, may_have_machines
from servers.base import lacks
from servers.http import JobServer

from tidemill.core.job import State

APP = """
@mill.task(retries=Retries(3, delay=0))
def brief(n): begin(); end(); return n

@mill.task(retries=Retries(3, delay=0))
def waits():
    begin()
    while not os.path.exists(f"{HERE}/go-{socket.gethostname()}"):
        time.sleep(0.01)
    note("over", socket.gethostname())
"""

LEASE = 10
"""Seconds of silence that a worker survives. A busy machine may stop it for some seconds."""


def _serve(kind: str, hosts: list[str], folder: Path) -> tuple[Server, str]:
    """A server that is reached from these addresses, and the url of its store."""
    if kind == "redis":
        redis = Redis(hosts=hosts)
        return redis, redis.url
    if kind == "postgresql":
        postgres = Postgres(hosts=hosts)
        return postgres, postgres.url()
    file = folder / "tokens.json"
    command = [sys.executable, "-m", "tidemill", "token", "create", "far", "--auth", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    jobs = JobServer("--quiet", "--host", "0.0.0.0", "--auth", str(file))
    return jobs, jobs.url.replace("://", f"://:{done.stdout.split()[-1]}@")


class Site:
    """Two machines, a server that both can reach, and a place on it."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, kind: str) -> None:
        self.machines: dict[str, Machine] = {}
        for name in ("far", "near"):
            self.machines[name] = Machine(name, folder / name)
            stack.callback(self.machines[name].close)
        hosts = [machine.host for machine in self.machines.values()]
        server, self.url = _serve(kind, hosts, folder)
        stack.callback(server.close)
        self.url += f"?owner_lease={LEASE}&patience=30"
        migrate = "&migrate=1" if kind == "postgresql" else ""
        (folder / "p").mkdir()
        self.place = stack.enter_context(open_place(folder / "p", self.url + migrate))
        self.place.write(APP)
        self.place.mill.broker.stats()  # made, and migrated
        file = folder / "p" / f"{self.place.app}.py"
        told = f"os.environ.get('TIDEMILL_TEST_URL', {self.place.url!r})"
        file.write_text(file.read_text().replace(repr(self.place.url), told))

    def worker(self, name: str) -> Worker:
        machine = self.machines[name]
        url = self.url.replace("127.0.0.1", machine.host)
        env = {**machine.env, "TIDEMILL_TEST_URL": url}
        return self.place.worker(slots=2, env=env, under=machine.under).wait_ready()


@pytest.fixture(params=["redis", "postgresql", "http"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    if not may_have_machines():
        lacks("network namespaces are not permitted here: run the tests as root")
    with contextlib.ExitStack() as stack:
        yield Site(stack, tmp_path, request.param)


def test_a_machine_that_is_cut_off_loses_its_jobs_and_comes_back(site: Site) -> None:
    # laws 4, 5, 6: they run elsewhere, its late verdicts fall, it goes on
    place: Place = site.place
    far = site.worker("far")
    job = place.enqueue("waits")
    place.wait_notes("begin")
    near = site.worker("near")
    workers = [owner for owner in place.mill.broker.owners() if owner.kind == "worker"]
    assert {owner.host for owner in workers} == {"far", "near"}
    # when
    site.machines["far"].cut()
    brief = [place.enqueue("brief", n) for n in range(3)]  # it may be told of these, or get one
    # then: without a witness it is a loss, and runs where the server is heard
    place.wait_notes(f"begin {job.id}", 2)
    record = job.refresh()
    assert (record.state, record.losses, record.attempt) == (State.RUNNING, 1, 0)
    assert "near" in record.worker
    # and what it says of the first run, once it is heard again, changes nothing
    (place.path / "go-far").touch()
    place.wait_notes("over far")
    time.sleep(0.2)
    site.machines["far"].mend()
    far.wait_line("begins anew")
    assert job.refresh().state is State.RUNNING
    (place.path / "go-near").touch()
    (record,) = place.finish([job])
    assert (record.state, record.attempt, record.losses) == (State.SUCCEEDED, 1, 1)
    assert [one.result(LIMIT) for one in brief] == [0, 1, 2]
    assert near.stop() == 0
    assert place.enqueue("brief", 5).result(LIMIT) == 5  # by the one that came back
    assert far.stop() == 0
    check_counters(place)
