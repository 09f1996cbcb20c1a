"""The base of private servers: a process, a folder, a port, a log."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

OWN_PORTS = range(10_000, 32_000)
"""Below the ports that the kernel gives to clients: a killed server finds its port free again."""


_RESERVED: list[int] = []
"""Descriptors of the files whose locks reserve ports for this process."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses, and that no client will be given.

    A server takes its port later than this, and another test process may draw the same number
    meanwhile. So the port is reserved: this process holds the lock of a file until it ends.
    """
    folder = Path(tempfile.gettempdir()) / "tidemill-test-ports"
    folder.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().choice(OWN_PORTS)
        fd = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", port))
        except OSError:
            os.close(fd)
            continue
        _RESERVED.append(fd)
        return port


def program(name: str, package: str) -> str:
    """The path of a server's binary, or the end of the test with what to install."""
    path = shutil.which(name)
    if not path:
        lacks(f"{name} is not installed; on Debian: apt-get install {package}")
    return path


def lacks(sentence: str) -> NoReturn:
    """End a test that cannot run on this machine: as failed on CI, as skipped elsewhere."""
    if os.environ.get("CI") == "true":
        pytest.fail(sentence)
    pytest.skip(sentence)


def listens(port: int) -> bool:
    """Whether somebody does, on 127.0.0.1."""
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def await_stop(pid: int) -> None:
    """Wait until a process that was sent SIGSTOP has stopped: its threads on other cores run on."""
    until = time.monotonic() + 30
    while any(_state(stat) not in "TtZ" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < until, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return "Z"


def _dying_with_us() -> list[str]:
    """What to put before a command so that it ends with this process, however that ends (Linux)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


_REFUSED: list[str] = []
"""Why no test may start a server, if none may."""


def refuse_servers() -> None:
    """Let each test fail from now on that starts a server: ``make quick`` needs none."""
    _REFUSED.append("make quick starts no server: mark this test as everyday or full")


class Server:
    """One server process, its folder and its port."""

    patience = 60.0
    """Seconds it has to start, and to end: far more than it takes on a busy machine."""

    def __init__(self, kind: str, above: Path | None = None) -> None:
        if _REFUSED:
            pytest.fail(_REFUSED[0])
        self.path = Path(tempfile.mkdtemp(prefix=f"tidemill-test-{kind}-", dir=above))
        self.port = free_port()
        self.log = self.path / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.env: dict[str, str] = {}
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Of the server."""
        return self.process.pid

    def launch(
        self, command: Sequence[str], answers: Callable[[], bool], user: str | None = None
    ) -> None:
        """Start the process and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*_dying_with_us(), *command],
                cwd=self.path,
                stdout=log,
                stderr=log,
                process_group=0,
                user=user,
                env={**os.environ, **self.env},
            )
        until = time.monotonic() + self.patience
        while not answers():
            if self.process.poll() is not None or time.monotonic() > until:
                text = self.log.read_text(errors="replace")[-3000:]
                raise AssertionError(f"{command[0]} did not start:\n{text}")
            time.sleep(0.01)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """End the server, all of its processes at once, and wait until it is dead."""
        if self.process is not None:
            try:
                os.killpg(self.process.pid, signum)
            except ProcessLookupError:
                pass
            self.process.wait(self.patience)
            self.process = None

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """For the time of a block it runs on and answers nobody."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await_stop(pid)
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def stop(self, signum: int) -> None:
        """Ask the server to end, and wait."""
        if self.process is not None:
            self.process.send_signal(signum)
            self.process.wait(self.patience)
            self.process = None

    def close(self) -> None:
        """End it and delete its folder."""
        self.kill()
        shutil.rmtree(self.path, ignore_errors=True)
