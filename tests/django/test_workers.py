"""Workers of a Django project, started by ``manage.py``, with real stores and real databases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django_project import SECONDS, Project
from servers import Postgres, postgres_url

from tidemill import Tidemill
from tidemill.brokers.registry import migrate_store
from tidemill.core.clock import new_id


def enqueue(mill: Tidemill, task: str, *args: Any) -> Any:
    return mill.enqueue(mill.call(f"shop.tasks.{task}", *args).using(queue="default", retries=0))


def result_of(mill: Tidemill, task: str, *args: Any) -> Any:
    return enqueue(mill, task, *args).result(timeout=SECONDS)


@pytest.mark.everyday
def test_a_worker_of_the_project_runs_jobs_of_both_kinds(tmp_path: Path) -> None:
    # given a project on LMDB, and a worker that replaced its manage.py
    project = Project(tmp_path)
    with project.worker() as worker, Tidemill(project.url) as mill:
        # when another process enqueues tasks of the framework and of tidemill
        code = """
from shop import tasks
results = [tasks.add.enqueue(1, 2), tasks.add_async.enqueue(3, 4), tasks.count_orders.enqueue(),
    tasks.count_orders_async.enqueue(), tasks.fails_once.enqueue()]
from tidemill.django import mill
for each in results:
    mill.job(each.id).wait(60)
    each.refresh()
job = tasks.write_order.enqueue("x")
print([each.return_value for each in results], job.result(60) > 0,
    len(set(results[0].worker_ids)), results[4].attempts)
"""
        answer = project.shell(code)
        # then they run in the worker's processes
        assert answer == "[3, 7, 0, 0, [2, 1]] True 1 2"
        # then the worker's supervisor has not loaded Django
        command = Path(f"/proc/{worker.pid}/cmdline").read_bytes() if _has_proc() else b"tidemill"
        assert b"manage.py" not in command
        # then the other verbs look at the same store
        assert "default" in project.manage("tidemill", "queues")
        assert len(list(mill.jobs(state="succeeded"))) == 6
    # then a signal has ended the worker in order
    assert worker.returncode == 0


def test_a_worker_loads_the_module_beside_the_settings(tmp_path: Path) -> None:  # case M15
    # project/tasks.py, whose package is no installed app
    code = "from tidemill.django import worker; print('beside.settings' in worker.mill.tasks)"
    assert Project(tmp_path).shell(code) == "True"


def _has_proc() -> bool:
    return Path("/proc/self").exists()


def test_a_module_that_is_not_discovered_is_imported_for_its_task(tmp_path: Path) -> None:
    # given a task of the framework outside of the modules called tasks
    project = Project(tmp_path)
    code = "from shop.more import elsewhere; r = elsewhere.enqueue(); print(r.id)"
    job_id = project.shell(code)
    # when a worker runs it that has not imported the module
    project.manage("tidemill", "worker", "-p", "1", "--burst")
    # then the task is found
    with Tidemill(project.url) as mill:
        assert mill.job(job_id).result(timeout=0) == "elsewhere"


def test_an_alias_with_a_store_of_its_own_has_its_own_worker(tmp_path: Path) -> None:
    # given an alias of TASKS with a URL, a task for it, and a task that is moved there
    project = Project(tmp_path)
    moved = "tasks.on_immediate.using(backend='second').enqueue()"
    code = f"from shop import tasks; print(tasks.on_second.enqueue().id, {moved}.id)"
    ids = project.shell(code).split()
    # when the worker of the alias runs, then it runs both
    project.manage("tidemill", "--backend", "second", "worker", "-p", "1", "--burst")
    with Tidemill(f"lmdb://{tmp_path}/second") as mill:
        assert [mill.job(each).result(timeout=0) for each in ids] == ["second", "immediate"]


def test_a_task_whose_worker_is_killed_has_failed(tmp_path: Path) -> None:
    # given a task that runs, and has no retries, as is the framework's rule
    project = Project(tmp_path)
    with Tidemill(project.url) as mill:
        with project.worker() as worker:
            code = "from shop import tasks; print(tasks.sleeps.enqueue(600).id)"
            job_id = project.shell(code)
            await_running(mill, job_id)
            # when its worker is killed
            worker.kill()
        # then the next worker notes it
        with project.worker():
            mill.job(job_id).wait(SECONDS)
    code = f"""
from shop.framework import default_task_backend
result = default_task_backend.get_result("{job_id}")
print(result.status, result.attempts)
"""
    assert project.shell(code) == "FAILED 1"


def await_running(mill: Tidemill, job_id: str) -> None:
    """Wait until the task has begun: a job counts as running from its lease on."""
    while mill.job(job_id).progress is None:
        time.sleep(0.05)


def test_a_connection_is_closed_after_a_job_unless_it_may_be_kept(tmp_path: Path) -> None:
    # given one slot, on SQLite
    for age, kept in ("0", False), ("600", True):
        project = Project(tmp_path, SITE_CONN_MAX_AGE=age)
        with project.worker("-c", "1"), Tidemill(project.url) as mill:
            # then the second job finds the connection of the first as CONN_MAX_AGE says
            assert result_of(mill, "was_connected") is False
            assert result_of(mill, "was_connected") is kept


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    server = Postgres()
    server.run("CREATE DATABASE site")
    with contextlib.closing(server):
        yield server


# case D4
def test_a_database_that_was_killed_comes_back(database: Postgres, tmp_path: Path) -> None:
    # given a worker with persistent connections (CONN_MAX_AGE = None)
    project = Project(tmp_path, SITE_POSTGRESQL=database.url("site"))
    with project.worker("-c", "4"), Tidemill(project.url) as mill:
        first = result_of(mill, "write_order", "before")
        # when the server kills all connections, and then restarts
        database.run(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'site'"
        )
        mill.job(enqueue(mill, "sleep_for", 1.1).id).wait(SECONDS)  # the connections are idle
        second = result_of(mill, "write_order", "after the kill")
        database.kill()
        database.start()
        mill.job(enqueue(mill, "sleep_for", 1.1).id).wait(SECONDS)
        third = result_of(mill, "write_order", "after the restart")
        fourth = result_of(mill, "count_orders_async")
    # then no job failed
    assert (second, third, fourth) == (first + 1, third, 3)


def test_connections_are_kept_as_conn_max_age_says(database: Postgres, tmp_path: Path) -> None:
    # given one slot and persistent connections
    project = Project(tmp_path, SITE_POSTGRESQL=database.url("site"))
    with project.worker("-c", "1"), Tidemill(project.url) as mill:
        # then one connection serves all jobs
        assert len({result_of(mill, "backend_pid") for _ in range(3)}) == 1
        # then a job that leaves a transaction open costs its connection, and nothing else
        before = result_of(mill, "backend_pid")
        assert result_of(mill, "leave_transaction_open")
        assert result_of(mill, "in_transaction") is False
        assert result_of(mill, "backend_pid") != before


def test_jobs_share_the_connections_of_a_pool(database: Postgres, tmp_path: Path) -> None:
    # given a pool of two connections, and a worker with eight slots
    project = Project(tmp_path, SITE_POSTGRESQL=database.url("site"), SITE_POOL="1")
    with project.worker("-c", "8"), Tidemill(project.url) as mill:
        # when more jobs than connections run, then each gets a connection, and gives it back
        jobs = [enqueue(mill, "backend_pid") for _ in range(40)]
        pids = {job.result(timeout=SECONDS) for job in jobs}
        assert len(pids) <= 2
        # then jobs in the event loop use the pool, too
        assert isinstance(result_of(mill, "count_orders_async"), int)


# case D1
def test_postgresql_in_the_same_database_joins_atomic(tmp_path: Path) -> None:
    # given a store in the database of the project
    name = f"join_{new_id()}"
    base = postgres_url().rpartition("/")[0]
    import psycopg

    with psycopg.connect(f"{base}/postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
    url = f"{base}/{name}"
    migrate_store(url)
    settings = {"SITE_POSTGRESQL": url, "SITE_STORE": url, "SITE_JOIN": "1"}
    project = Project(tmp_path, **settings)
    # when jobs are put inside transactions that commit, or roll back
    # then other connections see the jobs of those that committed, at the commit
    assert project.shell(JOIN) == "[True, True] True"


def test_a_store_in_a_table_of_the_project_joins_atomic_and_has_a_worker(tmp_path: Path) -> None:
    # given the store django://default, on SQLite
    project = Project(tmp_path, SITE_STORE="django://default")
    # when jobs are put inside transactions
    assert project.shell(JOIN) == "[True, True] True"
    # then a worker runs those that committed, and the verbs show the same store
    project.manage("tidemill", "worker", "-p", "1", "--burst")
    code = """
from tidemill.django import mill
print(sorted(str(job.state) for job in mill.jobs()))
"""
    assert project.shell(code) == "['succeeded', 'succeeded']"
    assert "default" in project.manage("tidemill", "queues")


JOIN = """
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from shop import tasks
from tidemill.django import mill
with transaction.atomic():
    kept = tasks.noop.enqueue()
    also = tasks.write_order.enqueue("x")
    inside = [mill.runtime.job_store.get(each.id) is None for each in (kept, also)]
    try:
        with transaction.atomic():
            tasks.noop.enqueue()
            raise RuntimeError
    except RuntimeError:
        pass
try:
    with transaction.atomic():
        tasks.noop.enqueue()
        raise RuntimeError
except RuntimeError:
    pass
print(inside, sorted(job.id for job in mill.jobs()) == sorted([kept.id, also.id]))
"""
