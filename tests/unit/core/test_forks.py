"""Hooks in forked children, whether Python saw the fork or not."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tidemill.core import forks
from tidemill.core.clock import new_id


def alone(check: Callable[..., None], *words: str) -> None:
    """Run a check in a new process.

    A child of a fork in C hangs in Python if another thread was about to take the interpreter lock.
    """
    command = [sys.executable, __file__, check.__name__, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def answer_of_child(fork: Callable[[], int], run: Callable[[], list[str]]) -> list[str]:
    """What a function returns in a forked child."""
    near, far = os.pipe()
    pid = fork()
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
    alone(child_makes_other_ids, fork)


def child_makes_other_ids(fork: str) -> None:
    def ids() -> list[str]:
        return [new_id()[11:] for _ in range(100)]

    theirs = [answer_of_child(FORKS[fork], ids) for _ in range(2)]
    made = {job_id for each in [*theirs, ids()] for job_id in each}
    assert len(made) == 300


@pytest.mark.parametrize("kind", ["page", "process id"])
def test_a_child_of_a_fork_in_c_calls_the_hooks_once(kind: str) -> None:  # case M1
    alone(child_calls_the_hooks_once, kind)


def child_calls_the_hooks_once(kind: str) -> None:
    if kind == "process id":
        forks.mark = forks._ProcessId()
    calls: list[str] = []
    forks._hooks[:] = [lambda: calls.append(new_id())]

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
    alone(child_of_a_visible_fork_has_called_the_hooks)


def child_of_a_visible_fork_has_called_the_hooks() -> None:
    assert answer_of_child(os.fork, lambda: ["called"] * forks.mark[0]) == ["called"]


def test_a_hook_that_raises_stops_no_other_hook_and_none_is_called_again() -> None:
    alone(hook_that_raises_stops_no_other_hook)


def hook_that_raises_stops_no_other_hook() -> None:
    calls: list[str] = []

    def broken() -> None:
        raise OSError("no descriptors left")

    forks._hooks[:] = [lambda: calls.append("first"), broken, lambda: calls.append("last")]

    def run() -> list[str]:
        with pytest.raises(OSError, match="no descriptors left"):
            forks.check_fork()
        forks.check_fork()
        return calls

    assert answer_of_child(FORKS["in C"], run) == ["first", "last"]


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
