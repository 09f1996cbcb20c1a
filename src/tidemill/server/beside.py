"""A worker beside the server: one command is a whole job system.

It is a process of its own, started by exec, as if from the command line: no user code runs in the
server for it, and what it does to the interpreter lock is no matter here. It ends with the server,
however that ends, and is started again when it ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

__all__ = ["Beside"]

log = logging.getLogger("tidemill.server")

CLEAN, UNUSABLE = 0, 2
"""Exit codes of a worker: all is well; its app cannot be loaded, so another try is no use."""

SHORTEST, LONGEST = 1.0, 30.0
"""Seconds before it is started again, growing."""


class Beside:
    """The worker of a server.

    Args:
        arguments: of ``tidemill worker``.
        unusable: is called with its exit code when it cannot be started at all.
    """

    def __init__(self, arguments: Sequence[str], unusable: Callable[[int], None]) -> None:
        self._command = [sys.executable, "-m", "tidemill", "worker", *arguments]
        self._unusable = unusable
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._watch: asyncio.Task[int] | None = None

    def start(self) -> None:
        """Start it, and again whenever it ends before it is told to."""
        self._watch = asyncio.ensure_future(self._run())

    async def _run(self) -> int:
        pause = SHORTEST
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--ends-with", str(os.getpid())),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for us to hand on
            )
            if self._stopping:
                self.stop_now()  # there was nobody to tell yet
            code = await self._process.wait()
            if self._stopping:
                return code
            if code == UNUSABLE:
                self._unusable(code)
                return code
            log.error("the worker ended with %d; starting it again in %g s", code, pause)
            await asyncio.sleep(pause)
            if self._stopping:
                return CLEAN
            pause = min(2 * pause, LONGEST)

    def stop(self) -> None:
        """Tell it, once, to finish what runs."""
        if not self._stopping:
            self._stopping = True
            self.stop_now()

    def stop_now(self) -> None:
        """Tell it again: it stops at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait until it has ended; its exit code."""
        return await self._watch if self._watch is not None else CLEAN
