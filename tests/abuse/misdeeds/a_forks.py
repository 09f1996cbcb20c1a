"""Forks and subprocesses."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from abuse.catalogue import dies, misdeed


def _reaped(child: int, seconds: float = 5.0) -> None:
    """Wait for the child.

    Raises:
        RuntimeError: the child lives on.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, _ = os.waitpid(child, os.WNOHANG)
        if pid:
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise RuntimeError("the forked child lived on")


def _fork(child: Callable[[], Any]) -> Any:
    pid = os.fork()
    if not pid:
        return child()
    return _reaped(pid)


def _raise() -> None:
    raise ValueError("in the child")


@misdeed("`os.fork()`, and the child returns from the task")
def fork_child_returns() -> None:
    _fork(lambda: None)


@misdeed("`os.fork()`, and the child raises")
def fork_child_raises() -> None:
    _fork(_raise)


@misdeed("`os.fork()`, and the child calls `sys.exit()`")
def fork_child_exits() -> None:
    _fork(lambda: sys.exit(3))


@misdeed("`os.fork()`, and the child calls `os._exit()`")
def fork_child_exits_at_once() -> None:
    _fork(lambda: os._exit(3))


@misdeed("`os.fork()`, and the child lives on")
def fork_child_lives_on() -> None:
    if not os.fork():
        time.sleep(60)
        os._exit(0)


@misdeed("a daemon: `os.fork()`, `os.setsid()`, `os.fork()`", leaves=True)
def fork_daemon() -> None:
    child = os.fork()
    if not child:
        os.setsid()
        if not os.fork():
            time.sleep(60)
        os._exit(0)
    _reaped(child)


@misdeed("a hundred forked children that nobody waits for")
def fork_zombies() -> None:
    for _ in range(100):
        if not os.fork():
            os._exit(0)


def _square(number: int) -> int:
    return number * number


def _pool(method: str) -> None:
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map(_square, range(5)) == [0, 1, 4, 9, 16]


@misdeed("`multiprocessing.Pool` by fork")
def pool_by_fork() -> None:
    _pool("fork")


@misdeed("`multiprocessing.Pool` by spawn")
def pool_by_spawn() -> None:
    _pool("spawn")


@misdeed("`multiprocessing.Pool` by forkserver")
def pool_by_forkserver() -> None:
    _pool("forkserver")


@misdeed("`multiprocessing.Process` by fork, which is terminated")
def process_terminated() -> None:
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(5)
    assert process.exitcode == -15, process.exitcode


@misdeed("`multiprocessing.Process` that nobody joins")
def process_left() -> None:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()


@misdeed("`ProcessPoolExecutor` by fork")
def executor_by_fork() -> None:
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert list(pool.map(_square, range(5))) == [0, 1, 4, 9, 16]


@misdeed("`ProcessPoolExecutor` by spawn")
def executor_by_spawn() -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        assert pool.submit(_square, 3).result(20) == 9


@misdeed("a subprocess that outlives the job")
def subprocess_left() -> None:
    subprocess.Popen(["sleep", "60"])


@misdeed("a subprocess in a session of its own that outlives the job", leaves=True)
def subprocess_left_in_session() -> None:
    subprocess.Popen(["sleep", "60"], start_new_session=True)


@misdeed("a subprocess that signals its process group with SIGTERM")
def subprocess_signals_group() -> None:
    subprocess.run(["sh", "-c", "kill -TERM 0"], check=False)


@misdeed("`os.exec*` of a program that ends", dies("exited with code 0"))
def exec_short() -> None:
    os.execv("/bin/true", ["true"])


@misdeed("`os.exec*` of a program that stays", dies("worker process"))
def exec_long() -> None:
    os.execv("/bin/sleep", ["sleep", "60"])
