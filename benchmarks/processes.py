"""Child processes: started in one way, and ended by pid with everything they started themselves."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil


def spawn(*command: str) -> subprocess.Popen[bytes]:
    """Start a worker in the folder of this measurement, its output in a log file there."""
    folder = Path(os.environ["BENCH_TMP"])
    number = len(list(folder.glob("worker-*.log")))
    with (folder / f"worker-{number}.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def spawn_python(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """``python -m module arguments…`` by :func:`spawn`."""
    return spawn(sys.executable, "-m", module, *arguments)


def spawn_script(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """A console script installed beside this interpreter, by :func:`spawn`."""
    return spawn(str(Path(sys.executable).parent / name), *arguments)


def tree(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all their descendants that are alive."""
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in [root, *root.children(recursive=True)]:
                found[process.pid] = process
    return list(found.values())


def stop(processes: Iterable[subprocess.Popen[bytes]], grace: float = 3.0) -> None:
    """Ask each to end; after ``grace`` seconds kill what is left of them and of their children."""
    processes = list(processes)
    family = tree(process.pid for process in processes)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=grace)
    for member in {*alive, *tree(process.pid for process in alive)}:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=grace)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)


class Redis:
    """A private redis-server: random port, 127.0.0.1 only, nothing written to disk."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.pid = process.pid
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"

    def flush(self) -> None:
        """Empty it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            if not connection.recv(16).startswith(b"+OK"):
                raise RuntimeError("redis-server refused FLUSHALL")


@contextlib.contextmanager
def private_redis(folder: Path) -> Iterator[Redis | None]:
    """Run one as long as the context lasts; None where redis-server is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            program,
            *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)),
            *("--save", "", "--appendonly", "no", "--daemonize", "no"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        redis = Redis(process, port)
        for _ in range(200):
            with contextlib.suppress(OSError):
                redis.flush()
                break
            time.sleep(0.05)
        else:
            raise RuntimeError("redis-server did not answer within 10 s")
        yield redis
    finally:
        stop([process])


class Postgres:
    """A private PostgreSQL: random port, 127.0.0.1 only, as durable as it is by default."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.pid = process.pid
        self.port = port
        self.url = f"postgresql://bench@127.0.0.1:{port}/postgres"

    def flush(self) -> None:
        """Empty it."""
        self.psql("DROP SCHEMA IF EXISTS tidemill CASCADE; DROP SCHEMA public CASCADE")
        self.psql("CREATE SCHEMA public; CHECKPOINT")

    def psql(self, statement: str) -> None:
        """Run a statement."""
        command = ["psql", "-qX", "-v", "ON_ERROR_STOP=1", self.url, "-c", statement]
        subprocess.run(command, check=True, timeout=60, capture_output=True)


@contextlib.contextmanager
def private_postgres(folder: Path) -> Iterator[Postgres | None]:
    """Run one as long as the context lasts; None where PostgreSQL is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin")) or [
        Path(path).parent for path in [shutil.which("postgres")] if path
    ]
    if not found:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    data = folder / "postgres"
    data.mkdir()
    user = "postgres" if os.getuid() == 0 else None  # it refuses root
    if user:
        folder.chmod(0o711)
        shutil.chown(data, user)
    initdb = [found[-1] / "initdb", "-D", data, "-U", "bench", "--auth", "trust", "-E", "UTF8"]
    subprocess.run(initdb, check=True, capture_output=True, user=user, cwd=data, timeout=120)
    command = [found[-1] / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", data]
    command += ["-c", "client_min_messages=warning"]
    process = subprocess.Popen(
        command,
        user=user,
        cwd=data,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        postgres = Postgres(process, port)
        for _ in range(200):
            with contextlib.suppress(subprocess.CalledProcessError):
                postgres.flush()
                break
            time.sleep(0.05)
        else:
            raise RuntimeError("postgres did not answer within 10 s")
        yield postgres
    finally:
        stop([process])
