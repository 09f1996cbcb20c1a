"""Misfortunes that every server, or every disk, can have."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from disks import kept_full
from excuses import Span
from servers import Proxy, Server

from misfortunes import Misfortune


class Stopped(Misfortune):
    """SIGSTOP: the server keeps its connections and answers nobody."""

    def __init__(self, server: Callable[[], Server], name: str, redelivers: bool = False) -> None:
        self.name = f"SIGSTOP of {name}"
        self.redelivers = redelivers
        self._server = server

    def strike(self, seconds: float) -> None:
        """Stop it for some seconds."""
        with self._server().stalled():
            time.sleep(seconds)


class CutLine(Misfortune):
    """Nothing goes through between a server and all of its clients, and nobody is told."""

    name = "a cut line"

    def __init__(self, lines: Callable[[], Sequence[Proxy]], redelivers: bool = False) -> None:
        self.redelivers = redelivers
        self._lines = lines

    def strike(self, seconds: float) -> None:
        """Cut the lines, and mend them after some seconds."""
        lines = self._lines()
        for line in lines:
            line.cut()
        try:
            time.sleep(seconds)
        finally:
            for line in lines:
                line.mend()


class FullDisk(Misfortune):
    """Another program takes each byte of the disk. ``after`` is called when there is room again."""

    name = "a full disk"

    def __init__(self, disk: Path, after: Callable[[], None] = lambda: None) -> None:
        self._disk = disk
        self._after = after

    def strike(self, seconds: float) -> None:
        """Keep the disk full for some seconds."""
        with kept_full(self._disk):
            time.sleep(seconds)
        self._after()


class OldImage(Misfortune):
    """The server's machine dies, and what comes back is an image from some seconds before."""

    name = "a restored snapshot"

    def __init__(self, server: Callable[[], Server]) -> None:
        self._server = server

    def strike(self, seconds: float) -> Span:
        """Take an image, and restore it after some seconds."""
        server = self._server()
        image = server.path.with_name(server.path.name + "-image")
        began = time.time()
        server.kill()
        copy_folder(server.path, image)
        server.start()
        time.sleep(seconds)
        server.kill()
        lost = Span(began, time.time())
        shutil.rmtree(server.path)
        image.rename(server.path)
        server.start()
        return lost


def copy_folder(old: Path, new: Path) -> None:
    """With owners, modes and holes."""
    subprocess.run(["cp", "-a", str(old), str(new)], check=True)
