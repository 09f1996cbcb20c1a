"""``manage.py tidemill dev``: a site and a worker, which end together at any moment."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from django_project import SECONDS, Project
from servers import free_port

from tidemill import Tidemill


@contextlib.contextmanager
def dev(project: Project, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command, which is ended, with all that it has started, however the test ends."""
    process = subprocess.Popen(
        project.command("tidemill", "dev", *options),
        env=project.environment,
        cwd="/",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        for left in processes_of(project):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


def processes_of(project: Project) -> list[psutil.Process]:
    """The living processes whose environment names the data of this project."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("SITE_DATA") == project.environment["SITE_DATA"]
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def assert_all_end(project: Project) -> None:
    """Wait until no process of the project is left: a killed process takes a moment to go."""
    _, alive = psutil.wait_procs(processes_of(project), SECONDS)
    assert [process.cmdline() for process in alive] == []


def await_start(project: Project, address: str) -> None:
    """Wait until the site answers and the worker is there; the site tells nobody."""
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/admin/"):
            break
    with Tidemill(project.url) as mill:
        job = mill.enqueue(mill.call("shop.tasks.sleep_for", 0).using(queue="default"))
        job.wait(timeout=SECONDS)


@pytest.mark.parametrize("options", [[], ["--noreload"]], ids=["reload", "noreload"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_site_and_the_worker(
    options: list[str], signum: signal.Signals, tmp_path: Path
) -> None:
    # given a site that answers, and a worker
    project = Project(tmp_path, SITE_DEBUG="1")
    address = f"127.0.0.1:{free_port()}"
    with dev(project, address, *options) as process:
        await_start(project, address)
        assert len(processes_of(project)) >= 4
        # when the command gets a signal, then all end
        process.send_signal(signum)
        assert process.wait(SECONDS) == 0
        assert_all_end(project)


@pytest.mark.parametrize("options", [[], ["--noreload"]], ids=["reload", "noreload"])
def test_a_kill_of_the_command_ends_the_site_and_the_worker(
    options: list[str], tmp_path: Path
) -> None:
    # given a site that answers, and a worker
    project = Project(tmp_path, SITE_DEBUG="1")
    address = f"127.0.0.1:{free_port()}"
    with dev(project, address, *options) as process:
        await_start(project, address)
        # when the command alone is killed, then all that it has started end
        process.kill()
        assert process.wait(SECONDS) == -signal.SIGKILL
        assert_all_end(project)


def test_the_end_of_the_site_ends_the_worker(tmp_path: Path) -> None:
    # given an address that the site cannot have
    project = Project(tmp_path, SITE_DEBUG="1")
    with dev(project, "192.0.2.1:1") as process:
        # then the command ends as runserver ends
        assert process.wait(SECONDS) == 1
        assert_all_end(project)


@pytest.mark.parametrize("options", [[], ["--noreload"]], ids=["reload", "noreload"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_at_any_moment_of_the_start_ends_all(
    options: list[str], signum: signal.Signals, tmp_path: Path
) -> None:
    # given the time that a start takes here and now
    project = Project(tmp_path, SITE_DEBUG="1")
    address = f"127.0.0.1:{free_port()}"
    begun = time.monotonic()
    with dev(project, address, *options):
        await_start(project, address)
        took = time.monotonic() - begun
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    for _ in range(3):
        # when the signal comes at a random moment of it
        moment = moments.uniform(0, 1.2 * took)
        with dev(project, address, *options) as process:
            time.sleep(moment)
            process.send_signal(signum)
            # then the command and all that it has started end; at first TERM has no handler
            code = process.wait(SECONDS)
            assert code in (0, -signum), (seed, moment)
            assert_all_end(project)
