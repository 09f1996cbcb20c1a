"""The guard: which process groups it kills when its worker has ended."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import pytest

from tidemill.worker.machine import GuardProcess


def _program() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, process_group=0)


def test_a_process_that_the_guard_could_not_take_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise BlockingIOError("no more processes")

    guard = GuardProcess()
    with contextlib.ExitStack() as end:
        refused, taken = _program(), _program()
        for one in (refused, taken):
            end.callback(one.communicate)
            end.callback(one.kill)
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refuse)
            with pytest.raises(BlockingIOError):
                guard.add(refused.pid)
        guard.add(taken.pid)
        guard.close()
        assert taken.wait(60) == -9
        assert refused.poll() is None
