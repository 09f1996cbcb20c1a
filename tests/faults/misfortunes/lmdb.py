"""LMDB: a small disk for the store, and a process beside the workers that holds the write lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from disks import mounted

from misfortunes import Misfortune, Rig
from misfortunes.anywhere import FullDisk

HOLDER = """
import sys
from tidemill.brokers.registry import open_broker
broker = open_broker(sys.argv[1])
def stay(moves):
    print("inside", flush=True)
    sys.stdin.readline()
broker._store.commits.run(broker._transitions, stay)
"""


class LmdbRig(Rig):
    """A store on a disk of its own."""

    def __init__(self, chosen: Collection[str] = ()) -> None:
        super().__init__(chosen)
        folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-test-disk-")))
        if self.wants(FullDisk.name):
            folder = self.enter_context(mounted(folder / "disk", "size=256m"))
        self.url = f"lmdb://{folder}/store"
        self.misfortunes = [HeldLock(self.url), StoppedHolder(self.url)]
        if self.wants(FullDisk.name):
            self.misfortunes.append(FullDisk(folder))


class HeldLock(Misfortune):
    """Another process holds the write lock of the store, and gives it back."""

    name = "the write lock is held"

    def __init__(self, url: str) -> None:
        self._url = url

    def strike(self, seconds: float) -> None:
        """Hold the lock for some seconds."""
        command = [sys.executable, "-c", HOLDER, f"{self._url}?patience=60"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
            assert holder.stdout.readline() == "inside\n", "the lock was not to be had"
            try:
                self.stay(holder, seconds)
            finally:
                holder.kill()

    def stay(self, holder: subprocess.Popen[str], seconds: float) -> None:
        """Keep the lock, and have it given back in order."""
        time.sleep(seconds)
        holder.communicate("\n")


class StoppedHolder(HeldLock):
    """The process that holds the write lock is stopped, and killed after that."""

    name = "SIGSTOP of the lock's holder, then SIGKILL"

    def stay(self, holder: subprocess.Popen[str], seconds: float) -> None:
        """Stop it for some seconds. The kernel frees the lock when it is killed."""
        os.kill(holder.pid, signal.SIGSTOP)
        time.sleep(seconds)
