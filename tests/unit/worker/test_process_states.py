"""The states of a worker process: no state comes back, and every state ends in GONE."""

from __future__ import annotations

import pytest

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
