"""The process and its surroundings."""

from __future__ import annotations

import ctypes
import locale
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time

from abuse.catalogue import ASYNCIO, MAIN, THREADS, blocks, fails, misdeed, times_out


@misdeed("`os.chdir` into a folder that is deleted then")
def changes_folder() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


@misdeed("`os.umask(0o777)`")
def changes_mask() -> None:
    os.umask(0o777)


@misdeed("`os.environ.clear()`")
def clears_environment() -> None:
    os.environ.clear()


@misdeed("the folder of temporary files deleted", probe="dump")
def deletes_temporary_files() -> None:
    assert os.environ["TMPDIR"].endswith("/abuse-tmp")  # never the machine's
    shutil.rmtree(os.environ["TMPDIR"])


@misdeed("another locale and another time zone")
def changes_locale() -> None:
    locale.setlocale(locale.LC_ALL, "C")
    os.environ["TZ"] = "Asia/Kathmandu"
    time.tzset()


@misdeed("`random.seed(0)`")
def seeds_random() -> None:
    random.seed(0)


@misdeed("`os.setsid()`", fails("PermissionError"))
def new_session() -> None:
    os.setsid()


@misdeed("the process moved into its supervisor's process group")
def joins_group() -> None:
    os.setpgid(0, os.getpgid(os.getppid()))


@misdeed(
    "the process moved into its supervisor's process group, and a blocking call",
    {THREADS: blocks(), MAIN: times_out(), ASYNCIO: blocks(gil=True)},
    timeout=1,
)
def joins_group_and_blocks() -> None:
    os.setpgid(0, os.getpgid(os.getppid()))
    time.sleep(60)


@misdeed("the signal at its supervisor's death reset (`prctl`)", killed=True)
def resets_death_signal() -> None:
    ctypes.CDLL(None).prctl(1, 0)


@misdeed("the signal at its supervisor's death reset, and a subprocess left", killed=True)
def resets_death_signal_with_subprocess() -> None:
    ctypes.CDLL(None).prctl(1, 0)
    if not os.fork():
        time.sleep(60)
        os._exit(0)


@misdeed("SIGUSR1 to its supervisor")
def signals_supervisor() -> None:
    os.kill(os.getppid(), signal.SIGUSR1)


@misdeed("SIGHUP to its supervisor")
def reloads_supervisor() -> None:
    os.kill(os.getppid(), signal.SIGHUP)


@misdeed("`os.nice(19)`")
def lowers_priority() -> None:
    os.nice(19)


@misdeed("no core files, no locked memory, a small stack (`setrlimit`)")
def lowers_limits() -> None:
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_STACK):
        resource.setrlimit(limit, (65536, resource.getrlimit(limit)[1]))


@misdeed("the interpreter's flags of debugging (`sys.setrecursionlimit`, `sys.flags`)")
def changes_interpreter() -> None:
    sys.setrecursionlimit(100_000)
    sys.set_int_max_str_digits(640)
    sys.dont_write_bytecode = True
