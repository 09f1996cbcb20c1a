"""A worker in threads of a program: ``with mill.worker():``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tidemill import State, Tidemill, TidemillError, this_job
from tidemill.brokers.lmdb.engine.group_commit import GroupCommit
from tidemill.errors import BrokerUnavailable
from tidemill.worker import steps


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


def test_a_job_whose_outcome_the_store_did_not_take_uses_an_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LAST_STEP", 0.0)
    mill, begun = Tidemill(f"lmdb://{tmp_path}/store"), threading.Event()

    def refuse(*args: Any, **options: Any) -> Any:
        raise BrokerUnavailable("the store is away")

    # given a store that is away from the start of a job on
    with monkeypatch.context() as away:

        @mill.task(name="ends")
        def ends() -> None:
            away.setattr(GroupCommit, "run", refuse)
            begun.set()

        job = ends.enqueue()
        with pytest.raises(TidemillError), mill.worker(1):
            assert begun.wait(60)
        mill.close()
    # when it is back, then another process finds the job on the scoreboard
    with Tidemill(f"lmdb://{tmp_path}/store") as other:
        other.broker.tick()
        record = other.job(job.id).refresh()
        assert (record.attempt, record.losses) == (1, 0)
        assert record.latest_error.endswith("died with its processes")
