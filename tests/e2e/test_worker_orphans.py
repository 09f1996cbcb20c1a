"""A worker that is process 1 of a container reaps what its tasks leave behind."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys

import psutil
import pytest
from harness import Place, eventually
from servers.base import lacks

from tidemill.core.job import State

APP = """
@mill.task
def leaves_orphans():
    for _ in range(5):
        subprocess.run(["sh", "-c", "sleep 0.2 & echo $! >> orphans"], check=True, cwd=HERE)

@mill.task(retries=1)
def dies():
    begin()
    if this_job().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""

SUBREAPER = (
    sys.executable,
    "-c",
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(36, 1); os.execv(sys.argv[1], sys.argv[1:])",
)
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


def permitted() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(sys.platform != "linux", reason="subreapers are Linux's")
@pytest.mark.parametrize("under", [SUBREAPER, NAMESPACE], ids=["subreaper", "process 1"])
def test_orphans_are_reaped(place: Place, under: tuple[str, ...]) -> None:
    if under is NAMESPACE and not permitted():
        lacks("not permitted to make a namespace")
    place.write(APP)
    worker = place.worker(under=under).wait_ready()
    supervisor = psutil.Process(worker.pid)
    if under is NAMESPACE:
        (supervisor,) = supervisor.children()
    assert psutil.Process(supervisor.pid).name() != "unshare"

    def children() -> list[tuple[str, str]]:
        """(name, status) of its children that are still there when asked for it."""
        found = []
        for child in supervisor.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((child.name(), child.status()))
        return found

    def zombies() -> list[tuple[str, str]]:
        return [child for child in children() if child[1] == psutil.STATUS_ZOMBIE]

    # given
    (record,) = place.finish([place.enqueue("leaves_orphans")])
    assert record.state is State.SUCCEEDED
    assert len((place.path / "orphans").read_text().split()) == 5
    # then: the five have been its children, and are none any more
    eventually(lambda: "sleep" not in [name for name, _ in children()], "they end")
    eventually(lambda: not zombies(), "they are reaped")
    # and how its own processes end is still known
    (record,) = place.finish([place.enqueue("dies")])
    assert record.state is State.SUCCEEDED
    assert "was killed by SIGKILL" in record.attempts[0].error
    eventually(lambda: not zombies(), "and so is the dead process")
    supervisor.terminate()
    assert worker.wait() == 0
