"""Memory and sizes."""

from __future__ import annotations

import resource
import sys
import threading
from typing import Any

from abuse.catalogue import End, fails, misdeed
from tidemill import current_job

MEGABYTE = 1_000_000
_kept: list[Any] = []


def _lower_memory_limit(room: int) -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + room, resource.RLIM_INFINITY))


@misdeed("more memory asked for than there is", fails("MemoryError"))
def asks_for_memory() -> None:
    bytearray(1 << 46)


@misdeed("a limit of memory (`RLIMIT_AS`) reached, and left in place", fails("MemoryError"))
def reaches_memory_limit() -> None:
    _lower_memory_limit(50 * MEGABYTE)
    bytearray(100 * MEGABYTE)


@misdeed("memory used up to a limit in small pieces, and kept", End("failed", "MemoryError"))
def uses_up_memory() -> None:
    _lower_memory_limit(20 * MEGABYTE)
    while True:
        _kept.append(bytearray(1000))


@misdeed("no further thread can start (`threading.stack_size`)")
def threads_cannot_start() -> None:
    threading.stack_size(1 << 45)


@misdeed("no file may be written (`RLIMIT_FSIZE`)")
def limits_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


@misdeed("an exception with a message of 80 MB", fails("ValueError"))
def huge_message() -> None:
    raise ValueError("x" * 80 * MEGABYTE)


@misdeed("an exception with 80 MB of odd characters", fails("ValueError"))
def huge_odd_message() -> None:
    raise ValueError("\udcff\x00\n" * (27 * MEGABYTE))


@misdeed("an exception with notes of 80 MB", fails("ValueError"))
def huge_note() -> None:
    error = ValueError("short")
    error.add_note("x" * 80 * MEGABYTE)
    raise error


@misdeed("an exception caused by 5,000 others in a row", fails("ValueError"))
def long_chain() -> None:
    error: BaseException | None = None
    for number in range(5000):
        following = ValueError(number)
        following.__cause__ = error
        error = following
    assert error is not None
    raise error


@misdeed("exception groups nested 2,000 deep", fails("ExceptionGroup"))
def deep_group() -> None:
    error: Exception = ValueError("innermost")
    for _ in range(2000):
        error = ExceptionGroup("x", [error])
    raise error


@misdeed("a result of 80 MB", fails("a result may have"))
def huge_result() -> bytes:
    return b"x" * 80 * MEGABYTE


@misdeed("a result that cannot be encoded", fails("its result cannot be kept"))
def unencodable_result() -> object:
    return object()


@misdeed("a result nested 5,000 deep", fails("its result cannot be kept"))
def deep_result() -> Any:
    result: Any = None
    for _ in range(5000):
        result = [result]
    return result


@misdeed("a result that contains itself", fails("its result cannot be kept"))
def cyclic_result() -> Any:
    result: list[Any] = []
    result.append(result)
    return result


@misdeed("a generator as the result", fails("its result cannot be kept"))
def generator_result() -> Any:
    return (number for number in range(3))


@misdeed("a recursion without an end", fails("RecursionError"))
def recursion() -> None:
    recursion()


@misdeed("a recursion limit of a few frames above the present depth", End("", process="kept"))
def recursion_limit_lowered() -> None:
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    sys.setrecursionlimit(depth + 5)


@misdeed("80 MB of log lines of the job")
def huge_log() -> None:
    for _ in range(80):
        current_job().log("x" * MEGABYTE)


@misdeed("100,000 reports of progress")
def much_progress() -> None:
    job = current_job()
    for number in range(100_000):
        job.progress(number, 100_000)


@misdeed("progress that is not a number", End("failed"))
def odd_progress() -> None:
    current_job().progress("half", object())  # type: ignore[arg-type]


@misdeed("300 MB of memory used and kept")
def memory_kept() -> None:
    _kept.append(bytearray(300 * MEGABYTE))
