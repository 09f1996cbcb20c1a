"""Processes that take their time to end are bounded in number."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.worker.lingering import ENDING_MOST
from tidemill.worker.machine import Machine
from tidemill.worker.process_pool import ProcessPool
from tidemill.worker.settings import Settings, Waits
from tidemill.worker.worker_process import WorkerProcess


class Ending(WorkerProcess):
    """A process that has run its last job, and is in a function of ``process_stop``."""

    def __init__(self, number: int) -> None:
        super().__init__(number, 1, 1, Waits())
        self.pid = number
        self.leaving = True
        self.exit_patience = 3600.0
        self.closed_at = self.born - 100 + number

    def exited(self, patience: float = 0.0) -> bool:
        return False

    def main_stack(self) -> str:
        return "in close_connections"

    def kill(self, *, by_us: bool = True) -> None:
        self.killed = by_us
        self.killed_at = self.born


def test_the_processes_that_end_most_slowly_are_killed_when_they_are_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Given more processes that end than may take memory.
    pool = ProcessPool(Settings(processes=2), "worker", str(tmp_path), Machine())
    ending = [Ending(number) for number in range(2 * ENDING_MOST + 3)]
    pool.processes = list(reversed(ending))
    # When the pool looks at them.
    pool.look_after()
    # Then the oldest are killed, by name, and the others have their time.
    assert [process.pid for process in ending if process.killed] == [0, 1, 2]
    assert caplog.text.count("is killed: it has not ended") == 3
    assert "worker process 1 is killed: it has not ended 99" in caplog.text
    pool.processes.clear()
    pool.close()
