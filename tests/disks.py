"""Small disks: each a tmpfs of its own, mounted for the time of one test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from servers.base import lacks


@contextlib.contextmanager
def mounted(place: Path, options: str = "size=12m") -> Iterator[Path]:
    """A disk at ``place`` for the time of a block, unmounted however the block ends."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        lacks("this test mounts a tmpfs, which needs root and CAP_SYS_ADMIN")
    try:
        yield place
    finally:  # a process that the test left behind may still have files open there
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill_disk(disk: Path) -> Path:
    """Leave no byte of a disk; the file that takes the room up."""
    other = disk / "other"
    with contextlib.suppress(OSError), other.open("ab", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return other


@contextlib.contextmanager
def kept_full(disk: Path) -> Iterator[None]:
    """For the time of a block another program takes each byte that is freed; then it frees all."""
    over = threading.Event()

    def take_all() -> None:
        while not over.wait(0.01):
            fill_disk(disk)

    other = fill_disk(disk)
    thread = threading.Thread(target=take_all)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        other.unlink()


def take_inodes(disk: Path) -> list[Path]:
    """Leave no inode of a disk; the files that take them up."""
    taken: list[Path] = []
    with contextlib.suppress(OSError):
        while True:
            file = disk / f"taken-{len(taken)}"
            file.touch()
            taken.append(file)
    return taken
