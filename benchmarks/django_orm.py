"""Drain no-op jobs through queues that keep their jobs in a Django database, in one run.

    python benchmarks/django_orm.py --python PEERS/bin/python --systems tidemill,django-q2,…

``--python`` is an interpreter with Django 6, the dependencies of tidemill, and the peers:
``django-q2 django-tasks-db django-vtasks pyzstd huey psycopg[binary]``. tidemill runs from this
checkout. ``tidemill-tasks`` and ``tidemill-tasks-lmdb`` are Django's own tasks on its backend.
``--postgres`` names a server on which databases may be made; without it only SQLite is measured.
huey has SQLite alone, in a file beside the database. The systems take turns, with two worker
processes each. A rate is jobs per second from the first run to the last.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.parse
from pathlib import Path
from typing import Any

SETTINGS = """
import json, os
SECRET_KEY = "bench"
USE_TZ = True
DEBUG = False
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": json.loads(os.environ["BENCH_DATABASE"])}
INSTALLED_APPS = json.loads(os.environ["BENCH_APPS"])
Q_CLUSTER = {
    "orm": "default", "workers": 2, "retry": 3600, "timeout": 600, "bulk": 50, "poll": 0.05,
    "queue_limit": 500, "save_limit": 100, "ack_failures": True, "label": "q",
}
BACKEND = os.environ["BENCH_BACKEND"] or "django.tasks.backends.dummy.DummyBackend"
TASKS = {"default": {"BACKEND": BACKEND, "OPTIONS": {}}}
HUEY = {
    "huey_class": "huey.SqliteHuey", "name": "bench", "filename": "huey.db", "immediate": False,
    "results": False, "consumer": {"workers": 2, "worker_type": "process"},
}
"""
WORK = """
import os, struct, time
_fd = os.open(os.environ["BENCH_RUNS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

def noop():
    os.write(_fd, struct.pack("d", time.time()))
"""

Q2 = """
from django_q.tasks import async_task
from django.db import transaction
def enqueue(count):
    with transaction.atomic():
        for _ in range(count):
            async_task("work.noop")
"""
TASKS_DB = """
from django.tasks import task
import work
@task()
def noop():
    work.noop()
from django.db import transaction
def enqueue(count):
    with transaction.atomic():
        for _ in range(count):
            noop.enqueue()
"""
TIDEMILL = """
from tidemill import Tidemill
import work
mill = Tidemill("django://default")
@mill.task
def noop():
    work.noop()
def enqueue(count):
    for start in range(0, count, 1000):
        mill.enqueue_many(noop.call() for _ in range(min(1000, count - start)))
"""


HUEY = """
from huey.contrib.djhuey import HUEY as queue
import work
@queue.task()
def noop():
    work.noop()
def enqueue(count):
    for _ in range(count):
        noop()
"""


@dataclasses.dataclass
class System:
    """One system: its apps, the module ``jobs`` with ``enqueue``, and its worker commands."""

    apps: list[str]
    jobs: str
    commands: list[list[str]]
    backend: str = ""
    url: str = "django://default"  # the store of tidemill
    kinds: tuple[str, ...] = ("sqlite", "postgresql")
    many: int = 1  # it gets so many times the jobs of a slow system


MANAGE = ["-m", "django"]
TASK_WORKER = [[*MANAGE, "tidemill", "worker", "-p", "2", "-c", "1"]]
SYSTEMS = {
    "tidemill": System(
        ["tidemill.django"],
        TIDEMILL,
        [["-m", "tidemill", "worker", "jobs:mill", "-p", "2", "-c", "1"]],
        many=10,
    ),
    "tidemill-tasks": System(
        ["tidemill.django", "jobs"], TASKS_DB, TASK_WORKER, "tidemill.django.TaskBackend", many=10
    ),
    "tidemill-tasks-lmdb": System(
        ["tidemill.django", "jobs"],
        TASKS_DB,
        TASK_WORKER,
        "tidemill.django.TaskBackend",
        "lmdb://./store",
        many=10,
    ),
    "huey": System(
        ["huey.contrib.djhuey", "jobs"], HUEY, [[*MANAGE, "run_huey"]], kinds=("sqlite",)
    ),
    "django-q2": System(["django_q"], Q2, [[*MANAGE, "qcluster"]]),
    "django-tasks-db": System(
        ["django_tasks_db"],
        TASKS_DB,
        [[*MANAGE, "db_worker", "--interval", "0.05"]] * 2,
        "django_tasks_db.DatabaseBackend",
    ),
    "django-vtasks": System(
        ["django_vtasks", "django_vtasks.db"],
        TASKS_DB,
        [[*MANAGE, "runworker", "--concurrency", "50"]] * 2,
        "django_vtasks.backends.db.DatabaseTaskBackend",
    ),
}


def database(kind: str, folder: Path, postgres: str, number: int) -> dict[str, Any]:
    """A fresh database."""
    if kind == "sqlite":
        options = {"transaction_mode": "IMMEDIATE", "timeout": 30}
        name = str(folder / "db.sqlite3")
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": options}
    import psycopg

    name = f"bench_{os.getpid()}_{number}"
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    parts = urllib.parse.urlsplit(postgres)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": parts.username or "",
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or 5432),
    }


def drain(system: System, python: str, where: dict[str, Any], folder: Path, count: int) -> float:
    """Jobs per second of one drain; 0 when the system did not end within two minutes."""
    (folder / "settings.py").write_text(SETTINGS)
    (folder / "work.py").write_text(WORK)
    (folder / "jobs.py").write_text(textwrap.dedent(system.jobs))
    runs = folder / "runs"
    source = str(Path(__file__).parents[1] / "src")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), source]),
        "DJANGO_SETTINGS_MODULE": "settings",
        "BENCH_DATABASE": json.dumps(where),
        "BENCH_APPS": json.dumps(["django.contrib.contenttypes", *system.apps]),
        "BENCH_BACKEND": system.backend,
        "BENCH_RUNS": str(runs),
        "TIDEMILL_URL": system.url,
    }
    fill = f"import django; django.setup(); import jobs; jobs.enqueue({count})"
    for command in ([*MANAGE, "migrate", "-v", "0"], ["-c", fill]):
        subprocess.run(
            [python, *command], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL
        )
    with (folder / "log").open("wb") as log:
        workers = [
            subprocess.Popen(
                [python, *command],
                cwd=folder,
                env=env,
                stdout=log,
                stderr=log,
                process_group=0,
            )
            for command in system.commands
        ]
        until = time.monotonic() + 120
        try:
            while not runs.exists() or runs.stat().st_size < 8 * count:
                if time.monotonic() > until or all(w.poll() is not None for w in workers):
                    print((folder / "log").read_text()[-2000:], file=sys.stderr)
                    break
                time.sleep(0.05)
        finally:
            for worker in workers:
                worker.terminate()
            for worker in workers:
                try:
                    worker.wait(20)
                except subprocess.TimeoutExpired:
                    pass
                with contextlib.suppress(ProcessLookupError):  # its children
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    if not runs.exists():
        return 0.0
    import struct

    raw = runs.read_bytes()
    times = sorted(t for (t,) in struct.iter_unpack("d", raw[: len(raw) // 8 * 8]))
    return (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--postgres", default="")
    parser.add_argument(
        "--jobs", type=int, default=1000, help="jobs of a peer; tidemill gets 10 times as many"
    )
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    number = 0
    for kind in ["sqlite", *(["postgresql"] if args.postgres else [])]:
        names = [name for name in args.systems.split(",") if kind in SYSTEMS[name].kinds]
        rates: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.runs):
            for name in names:
                number += 1
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder)
                    where = database(kind, path, args.postgres, number)
                    count = args.jobs * SYSTEMS[name].many
                    rates[name].append(drain(SYSTEMS[name], args.python, where, path, count))
                    print(f"{kind} {name}: {rates[name][-1]:.0f}/s", flush=True)
        ours = rates.get("tidemill")
        for name in names:
            ratio = ""
            if ours and name != "tidemill":
                pairs = [a / b for a, b in zip(ours, rates[name], strict=True) if b]
                ratio = (
                    f"  tidemill is {statistics.median(pairs):.1f} times faster" if pairs else ""
                )
            print(
                f"| {kind} | {name} | {statistics.median(rates[name]):.0f}/s |{ratio}", flush=True
            )


if __name__ == "__main__":
    main()
