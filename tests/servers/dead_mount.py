"""A mount whose server does not answer: system calls on it end for no signal, also SIGKILL."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from .base import lacks

_INIT, _MINOR = 26, 31
_FORCE, _DETACH = 1, 2
_REQUEST = struct.Struct("=IIQ")  # length, what is asked, its number
_ANSWER = struct.Struct("=IiQ4I2H2I2HI7I")  # length, error, number; version and sizes


@contextlib.contextmanager
def dead_mount(path: Path) -> Iterator[None]:
    """A FUSE file system at ``path`` that reads requests and answers none, until the block ends."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        lacks("mounting a file system that does not answer takes root and /dev/fuse")
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
        target = os.fsencode(path)
        if libc.mount(b"dead", target, b"fuse", 0, options) != 0:
            lacks(f"mounting is not permitted: {os.strerror(ctypes.get_errno())}")
        reader = threading.Thread(target=_serve, args=(fd,), daemon=True)
        reader.start()
        try:
            yield
        finally:
            libc.umount2(target, _FORCE | _DETACH)  # calls on it end with an error
            reader.join()
    finally:
        os.close(fd)


def _serve(fd: int) -> None:
    """Say hello, and then read what is asked; the kernel ends no call whose request was read."""
    while True:
        try:
            request = os.read(fd, 1 << 20)
        except OSError:
            return  # the file system is gone
        _, asked, number = _REQUEST.unpack_from(request)
        if asked == _INIT:
            sizes = (7, _MINOR, 0, 0, 0, 0, 1 << 16, 1, 0, 0, 0)
            os.write(fd, _ANSWER.pack(_ANSWER.size, 0, number, *sizes, *[0] * 7))
