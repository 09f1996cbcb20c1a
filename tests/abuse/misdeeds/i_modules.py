"""Functions and modules replaced."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import contextvars
import json
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from typing import Any

from abuse.catalogue import ASYNCIO, MAIN, SUCCEEDS, THREADS, End, fails, misdeed

_LOST = End("", dies=True)
"""The event loop itself needs the functions: its process is replaced, then or later."""


def _replaced(*args: Any, **options: Any) -> Any:
    raise SystemError("a function that the task has replaced")


def _replace(module: Any, *names: str) -> None:
    for name in names:
        setattr(module, name, _replaced)


@misdeed("`time.time` stands still")
def time_stands_still() -> None:
    time.time = time.monotonic = time.perf_counter = lambda: 1.0  # type: ignore[assignment]


@misdeed("`time.time`, `time.sleep`, `time.monotonic` raise")
def time_raises() -> None:
    _replace(time, "time", "sleep", "monotonic", "perf_counter", "clock_gettime", "time_ns")


_IN_LOOP = {THREADS: _LOST, MAIN: SUCCEEDS, ASYNCIO: _LOST}


@misdeed("methods of `socket.socket` raise", _IN_LOOP)
def socket_raises() -> None:
    for name in ("send", "sendall", "recv", "recv_into", "shutdown", "close", "fileno", "connect"):
        setattr(socket.socket, name, _replaced)


@misdeed("`socket.socket` is gone")
def socket_gone() -> None:
    _replace(socket, "socket", "socketpair", "create_connection", "gethostname")


@misdeed("functions of `os` raise")
def os_raises() -> None:
    _replace(os, "write", "read", "open", "close", "getpid", "kill", "killpg", "urandom", "unlink")
    _replace(os, "stat", "fstat", "path", "getppid", "fsync", "getpgrp", "sysconf")


@misdeed("functions of `json`, `pickle` and `struct` raise")
def codecs_raise() -> None:
    _replace(json, "dumps", "loads")
    _replace(pickle, "dumps", "loads")
    _replace(struct, "pack", "unpack", "Struct")


@misdeed("classes of `threading` are gone")
def threading_gone() -> None:
    _replace(threading, "Lock", "RLock", "Thread", "Event", "Condition", "get_ident", "local")
    _replace(threading, "current_thread", "main_thread")


@misdeed("functions of `signal` raise")
def signal_raises() -> None:
    _replace(signal, "signal", "pthread_kill", "setitimer", "getsignal", "alarm")


@misdeed("functions of `contextvars` raise", _IN_LOOP)
def contextvars_raise() -> None:
    _replace(contextvars, "copy_context", "Context", "ContextVar")


@misdeed("functions of `asyncio` raise")
def asyncio_raises() -> None:
    _replace(
        asyncio, "current_task", "new_event_loop", "Runner", "run", "all_tasks", "get_running_loop"
    )


@misdeed("functions of `traceback` raise", fails("ValueError"))
def traceback_raises() -> None:
    _replace(traceback, "format_exception", "format_tb", "extract_stack", "StackSummary")
    raise ValueError("so that the worker needs them")


@misdeed("`sys.modules` cleared")
def modules_cleared() -> None:
    sys.modules.clear()


@misdeed("`sys.path` and `sys.meta_path` cleared, `builtins.__import__` raises")
def imports_raise() -> None:
    sys.path.clear()
    sys.meta_path.clear()
    builtins.__import__ = _replaced


@misdeed("`builtins.open` and `builtins.print` raise")
def files_raise() -> None:
    _replace(builtins, "open", "print")


@misdeed(
    "`builtins.len`, `isinstance` and `getattr` raise",
    End("failed", "worker process", "replaced", dies=True),
)
def builtins_raise() -> None:
    _replace(builtins, "len", "isinstance", "getattr", "list", "min", "max", "type")


@misdeed("the attributes of `current_job()` overwritten")
def job_overwritten() -> None:
    from tidemill import current_job

    job = current_job()
    job.attempt = job.waiting = 99
    job.cancelled = True
    job.state = {}
    for name in ("token", "slot", "id"):
        with contextlib.suppress(AttributeError):
            setattr(job, name, 99)
