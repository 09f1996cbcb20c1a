"""Workers of a job server: it is killed under them, they are killed; tokens, TLS, two machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Place, alive, check_counters, check_no_overlap, eventually, open_place, runs_of
from servers.http import JobServer, certificate

from tidemill import Tidemill
from tidemill.core.job import State
from tidemill.errors import BrokerUnavailable

S = State

APP = """
@mill.task(retries=Retries(3, delay=0))
def waits(n=0):
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()
    return n

@mill.task(retries=Retries(3, delay=0))
def short(n=0): begin(); end(); return n
"""


@pytest.fixture
def server() -> Iterator[JobServer]:
    server = JobServer("--quiet")
    yield server
    server.close()


@pytest.fixture
def place(server: JobServer, tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "p"
    folder.mkdir()
    with open_place(folder, f"{server.url}?owner_lease=8&patience=60") as place:
        place.write(APP)
        yield place


@pytest.mark.everyday
def test_accepted_jobs_survive_the_kill_of_the_server(place: Place, server: JobServer) -> None:
    # law 1: of a producer that is in the middle of putting when the server is killed, twice
    code = (
        "import sys\nfrom tidemill import Tidemill\n"
        f"mill = Tidemill({place.url!r})\n"
        "for n in range(400):\n    mill.queue('q').put(n)\n    print(n, flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as producer:
        for until in (50, 150):
            while int(producer.stdout.readline()) < until:
                pass
            server.kill()
            server.start()
        said = [int(line) for line in producer.stdout.read().split()]
        assert producer.wait() == 0
    assert said[-1] == 399
    # then: each is there, once, in its order
    queue, found = place.mill.queue("q"), []
    while (message := queue.get(timeout=0)) is not None:
        found.append(message.body)
        message.ack()
    assert found == list(range(400))


def test_workers_go_on_when_the_server_was_killed(place: Place, server: JobServer) -> None:
    # laws 3, 5, 6: what runs goes on, ends while nobody hears it, and is settled once
    worker = place.worker(processes=2, slots=2).wait_ready()
    jobs = place.enqueue_many("waits", [(n,) for n in range(4)])
    place.wait_notes("begin", 4)
    server.kill()
    worker.wait_line("cannot reach the job server")
    (place.path / "go").touch()
    place.wait_notes("end", 4)
    time.sleep(8.5)  # longer than the lease: time in which nobody hears does not count
    server.start()
    for n, record in enumerate(place.finish(jobs)):
        assert (record.state, record.attempt, record.losses) == (S.SUCCEEDED, 1, 0)
        assert jobs[n].result(1) == n
    worker.wait_line("the broker is back")
    assert [job.result(30) for job in place.enqueue_many("short", [(n,) for n in range(50)])] == [
        *range(50)
    ]
    assert {len(runs) for runs in runs_of(place.ledger()).values()} == {1}
    assert worker.stop() == 0
    check_counters(place)


def test_a_worker_that_vanishes_is_given_up_after_its_lease(place: Place) -> None:
    # laws 5, 6: nobody is a witness, so each job gets a loss, and runs again
    worker = place.worker(processes=2, slots=1).wait_ready()
    jobs = place.enqueue_many("waits", [(n,) for n in range(2)])
    place.wait_notes("begin", 2)
    children = [process.pid for process in worker.children()]
    os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: not any(map(alive, children)), "its processes end by themselves")
    worker.wait()
    (place.path / "go").touch()
    place.worker(slots=4)
    for record in place.finish(jobs):
        assert (record.state, record.attempt, record.losses) == (S.SUCCEEDED, 1, 1)
    check_no_overlap(place.ledger())
    check_counters(place)


def test_tls_with_a_private_certificate_authority(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    server = JobServer("--quiet", "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        url = server.url.replace("http", "https")
        with pytest.raises(BrokerUnavailable, match=r"\?ca="):
            Tidemill(f"{url}?patience=0").broker.stats()
        with open_place(tmp_path, f"{url}?ca={cert}") as place:
            place.write(APP)
            place.worker(slots=2).wait_ready()
            assert [place.enqueue("short", n).result(30) for n in range(5)] == [*range(5)]
    finally:
        server.close()


@pytest.mark.everyday
def test_large_results_that_end_together_are_all_kept(tmp_path: Path, server: JobServer) -> None:
    # law 15: together they have more bytes than the server takes in one request
    with open_place(tmp_path, server.url) as place:
        place.write(
            """
            @mill.task(retries=0)
            def gives(size):
                begin()
                while not os.path.exists(HERE + "/go"):
                    time.sleep(0.01)
                return b"x" * size
            """
        )
        place.worker(slots=4).wait_ready()
        jobs = [place.enqueue("gives", 12_000_000 + n) for n in range(4)]
        place.wait_notes("begin", 4)
        (place.path / "go").touch()
        assert [len(job.result(60)) for job in jobs] == [12_000_000 + n for n in range(4)]
