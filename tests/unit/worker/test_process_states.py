"""The states of a worker process: no state comes back, and every state ends in GONE."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.worker.child_protocol import Hello, Up
from tidemill.worker.pool import ProcessPool
from tidemill.worker.process import _NEXT, ScoreboardShares, State, WorkerProcess
from tidemill.worker.settings import Settings


def test_a_process_goes_forward_only_and_always_to_its_end() -> None:
    assert all(after > state for state, others in _NEXT.items() for after in others)
    assert [state for state in State if not _NEXT[state]] == [State.GONE]


def test_a_forbidden_transition_raises() -> None:
    process = WorkerProcess(0, ScoreboardShares(1, 1), Settings())
    process.become(State.LEAVING)
    with pytest.raises(AssertionError, match="is LEAVING and cannot become SERVING"):
        process.become(State.SERVING)
    assert process.state is State.LEAVING


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_process_that_ended_by_itself_spares_no_job_however_it_goes_on(by_itself: bool) -> None:
    process = WorkerProcess(0, ScoreboardShares(1, 1), Settings())
    if by_itself:
        process.become(State.CLOSED)
    for state in (State.KILLED, State.UNDEAD):
        process.become(state)
        assert process.spares_its_jobs is not by_itself


class Died:
    """A process that has said that it leaves, and is dead before anybody has read this."""

    pid, hello = 1, None

    def __init__(self) -> None:
        self.socket = SimpleNamespace(drain=lambda: [Up(leaving=True)], fileno=lambda: 3)

    def exited(self, patience: float) -> bool:
        return True


def test_a_process_that_said_that_it_leaves_is_no_crash_when_it_is_found_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine: Any = SimpleNamespace(
        local=False, reap=lambda reap_own: None, lock=contextlib.nullcontext
    )
    pool = ProcessPool(Settings(), "w", str(tmp_path), machine, lambda: None)
    monkeypatch.setattr(pool, "replace", lambda: None)
    process = WorkerProcess(0, pool.shares, Settings())
    body: Any = Died()
    process._body, process.socket = body, body.socket
    process.greet(Hello())
    pool.processes.append(process)
    pool.reap()
    assert process.state is State.CLOSED
    assert process.left
