"""Hooks in forked children, whether Python saw the fork or not."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

from tidemill.core import forks
from tidemill.core.clock import new_id


def answer_of_child(fork: Callable[[], int], run: Callable[[], list[str]]) -> list[str]:
    """What a function returns in a forked child."""
    near, far = os.pipe()
    interval = sys.getswitchinterval()
    # A child in which a thread of the parent waits for the interpreter lock hangs in Python.
    sys.setswitchinterval(1000)
    time.sleep(0.01)
    pid = fork()
    sys.setswitchinterval(interval)
    if not pid:
        try:
            os.write(far, json.dumps(run()).encode())
        finally:
            os._exit(0)
    os.close(far)
    with open(near) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return list(json.loads(text))


FORKS = {"os.fork": os.fork, "in C": ctypes.PyDLL(None).fork}


@pytest.mark.parametrize("fork", FORKS)
def test_a_forked_child_makes_other_ids(fork: str) -> None:  # case M1
    def ids() -> list[str]:
        return [new_id()[11:] for _ in range(100)]

    theirs = [answer_of_child(FORKS[fork], ids) for _ in range(2)]
    made = {job_id for each in [*theirs, ids()] for job_id in each}
    assert len(made) == 300


@pytest.mark.parametrize("kind", ["page", "process id"])
def test_a_child_of_a_fork_in_c_calls_the_hooks_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # case M1
    if kind == "process id":
        monkeypatch.setattr(forks, "mark", forks._ProcessId())
    calls: list[str] = []
    monkeypatch.setattr(forks, "_hooks", [lambda: calls.append(new_id())])

    def run() -> list[str]:
        threads = [threading.Thread(target=forks.check_fork) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        forks.check_fork()
        return calls

    assert len(answer_of_child(FORKS["in C"], run)) == 1
    forks.check_fork()
    assert not calls  # the parent is no child


def test_a_child_of_a_visible_fork_has_called_the_hooks() -> None:
    assert answer_of_child(os.fork, lambda: ["called"] * forks.mark[0]) == ["called"]


def test_a_hook_that_raises_stops_no_other_hook_and_none_is_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def broken() -> None:
        raise OSError("no descriptors left")

    hooks = [lambda: calls.append("first"), broken, lambda: calls.append("last")]
    monkeypatch.setattr(forks, "_hooks", hooks)

    def run() -> list[str]:
        with pytest.raises(OSError, match="no descriptors left"):
            forks.check_fork()
        forks.check_fork()
        return calls

    assert answer_of_child(FORKS["in C"], run) == ["first", "last"]
