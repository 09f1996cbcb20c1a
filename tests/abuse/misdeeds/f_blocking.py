"""Calls that do not return."""

from __future__ import annotations

import ctypes
import os
import queue
import re
import select
import socket
import subprocess
import sys
import threading
import time

from abuse.catalogue import ASYNCIO, MAIN, THREADS, End, blocks, misdeed, times_out

_IN_MAIN = {THREADS: blocks(), MAIN: times_out(), ASYNCIO: blocks(gil=True)}
_IN_PYTHON = {THREADS: times_out(), MAIN: times_out(), ASYNCIO: blocks(gil=True)}
_NEVER = {THREADS: blocks(), MAIN: blocks(), ASYNCIO: blocks(gil=True)}
_GIL = blocks(gil=True)


@misdeed("`time.sleep` past the timeout", _IN_MAIN, timeout=1)
def sleeps() -> None:
    time.sleep(60)


@misdeed("an endless loop", _IN_PYTHON, timeout=1)
def loops() -> None:
    while True:
        pass


@misdeed("an endless loop that swallows every exception", _NEVER, timeout=1)
def swallows() -> None:
    while True:
        try:
            while True:
                time.sleep(0.001)
        except BaseException:
            continue


@misdeed("a cleanup (`finally`) that does not end", _NEVER, timeout=1)
def cleans_up_for_ever() -> None:
    try:
        time.sleep(60)
    finally:
        while True:
            try:
                time.sleep(1)
            except BaseException:
                continue


@misdeed("a blocking `socket.recv`", _IN_MAIN, timeout=1)
def receives() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.recv(1)


@misdeed("a lock that nobody releases", _IN_MAIN, timeout=1)
def waits_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@misdeed("`queue.get` on an empty queue", _IN_MAIN, timeout=1)
def waits_for_queue() -> None:
    queue.Queue[int]().get()


@misdeed("`subprocess.run` of a program that stays", _IN_MAIN, timeout=1)
def waits_for_subprocess() -> None:
    subprocess.run(["sleep", "60"], check=False)


@misdeed("a C call that releases the interpreter lock", _IN_MAIN, timeout=1)
def waits_in_c() -> None:
    libc = ctypes.CDLL(None)
    while True:  # a signal interrupts each call
        libc.sleep(60)


@misdeed("`select` without a limit", _IN_MAIN, timeout=1)
def selects() -> None:
    select.select([], [], [])


@misdeed("a regular expression that backtracks for ever", _GIL, timeout=1)
def backtracks() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


@misdeed("a power of big integers", _GIL, timeout=1)
def computes_power() -> None:
    pow(7, 10**9)


@misdeed("a C call that keeps the interpreter lock", _GIL, timeout=1)
def waits_in_c_with_lock() -> None:
    read, _ = os.pipe()
    ctypes.PyDLL(None).read(read, ctypes.create_string_buffer(8), 1)
    while True:
        pass


@misdeed("a switch interval of 1,000 s left in place")
def switch_interval_raised() -> None:
    sys.setswitchinterval(1000)


# A thread that gives up the lock may let the interruption in before the loop begins to hold it.
@misdeed(
    "a switch interval of 1,000 s, and an endless loop",
    End("failed", "JobTimeout", interrupts=True),
    timeout=1,
)
def switch_interval_raised_in_loop() -> None:
    sys.setswitchinterval(1000)
    while True:
        pass
