"""Descriptors."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from typing import Any

from abuse.catalogue import SUCCEEDS, End, misdeed

_kept: list[Any] = []

GONE = End("", "", "replaced", dies=True)


@misdeed("`os.closerange(3, 256)`", GONE)
def closes_all() -> None:
    os.closerange(3, 256)


@misdeed("descriptors 0, 1 and 2 closed")
def closes_standard() -> None:
    for fd in (0, 1, 2):
        os.close(fd)


def _ours(kind: Any) -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:
            continue
        if int(name) > 2 and kind(mode):
            found.append(int(name))
    return found


@misdeed("all sockets closed", GONE)
def closes_sockets() -> None:
    for fd in _ours(stat.S_ISSOCK):
        os.close(fd)


@misdeed("all sockets shut down", GONE)
def shuts_sockets_down() -> None:
    for fd in _ours(stat.S_ISSOCK):
        sock = socket.socket(fileno=os.dup(fd))
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()


@misdeed("all sockets replaced by `/dev/null`", GONE)
def replaces_sockets() -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for fd in _ours(stat.S_ISSOCK):
        os.dup2(null, fd)


@misdeed("all regular files closed")
def closes_files() -> None:
    for fd in _ours(stat.S_ISREG):
        os.close(fd)


@misdeed("all descriptors made non-blocking")
def makes_non_blocking() -> None:
    for fd in _ours(lambda mode: True):
        os.set_blocking(fd, False)


@misdeed("all descriptors made inheritable, and a subprocess left")
def makes_inheritable() -> None:
    import subprocess

    for fd in _ours(lambda mode: True):
        os.set_inheritable(fd, True)
    subprocess.Popen(["sleep", "60"], close_fds=False)


@misdeed("`sys.stdout` and `sys.stderr` closed")
def closes_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


class _Raising:
    def __getattr__(self, name: str) -> Any:
        raise SystemError(f"{name} of the stream")


@misdeed("`sys.stdout` and `sys.stderr` replaced by objects that raise")
def replaces_streams() -> None:
    sys.stdout = sys.stderr = _Raising()  # type: ignore[assignment]


@misdeed("`sys.stdout` and `sys.stderr` set to `None`")
def unsets_streams() -> None:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]


@misdeed("standard error is a pipe without a reader")
def breaks_standard_error() -> None:
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(read)
    os.close(write)
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    except ValueError:  # not in the main thread
        pass


@misdeed("all descriptors used up and kept", End("failed", "Too many open files"))
def uses_up_descriptors() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    while True:
        _kept.append(os.open("/dev/null", os.O_RDONLY))


@misdeed("`socket.setdefaulttimeout(0.01)`", SUCCEEDS)
def default_timeout_set() -> None:
    socket.setdefaulttimeout(0.01)
