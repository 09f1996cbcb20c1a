"""A worker in threads of a program: ``with mill.worker():``."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tidemill import State, Tidemill, TidemillError, this_job


def test_a_program_runs_its_own_jobs(tmp_path: Path) -> None:
    with Tidemill(f"lmdb://{tmp_path}/store") as mill:

        @mill.task(name="thread")
        def thread() -> str:
            return threading.current_thread().name

        job = thread.enqueue()
        with mill.worker():
            assert job.result(timeout=60) != threading.current_thread().name
            (owner,) = mill.broker.owners()
            assert (owner.kind, owner.concurrency) == ("worker", 4)
            assert owner.name.rpartition(":")[0]  # host:pid, as of every worker
        assert mill.broker.owners() == []


def test_the_end_of_the_block_waits_for_running_jobs_and_leaves_the_others() -> None:
    with Tidemill("memory://") as mill:
        begun = threading.Event()

        @mill.task(name="slow")
        def slow() -> str:
            job = this_job()
            begun.set()
            job.wait_stopping(60)
            return "whole"

        first, second, other = slow.enqueue(), slow.enqueue(), slow.using(queue="q").enqueue()
        with mill.worker(1, queues=["default"]):
            assert begun.wait(60)
        assert (first.state, first.result()) == (State.SUCCEEDED, "whole")
        assert (second.state, other.state) == (State.READY, State.READY)


def test_a_worker_that_cannot_serve_raises_at_the_start_of_the_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    mill = Tidemill(f"lmdb://{tmp_path}/file/store")
    with pytest.raises(TidemillError, match="the worker could not serve"):
        mill.worker().__enter__()
    assert "the worker ends: " in caplog.text
