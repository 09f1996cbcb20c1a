"""The embedded worker: ``serve`` with a worker is a whole job system in one command.

The worker is a process of its own, started as from the command line. So the server runs no user
code, and user code cannot hold the server's interpreter lock. The worker ends with the server,
however the server ends. When the worker ends by itself, the server starts it again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

log = logging.getLogger("tidemill.server")

CLEAN, UNUSABLE = 0, 2
"""Exit codes of a worker: 0 for success, 2 for an app that no restart could load."""

SHORTEST, LONGEST = 1.0, 30.0
"""Seconds before a restart; each pause is twice as long as the last."""


class EmbeddedWorker:
    """The worker of a server.

    Args:
        arguments: the arguments of ``tidemill worker``.
        unusable: called with the exit code when the worker cannot start at all.
    """

    def __init__(self, arguments: Sequence[str], unusable: Callable[[int], None]) -> None:
        self._command = [sys.executable, "-m", "tidemill", "worker", *arguments]
        self._unusable = unusable
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._watch: asyncio.Task[int] | None = None

    def start(self) -> None:
        """Start the worker, and start it again whenever it ends by itself."""
        self._watch = asyncio.ensure_future(self._run())

    async def _run(self) -> int:
        pause = SHORTEST
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--ends-with",
                str(os.getpid()),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the server forwards a Ctrl-C
            )
            if self._stopping:
                self.stop_now()  # stop() was called before the process existed
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
        """Tell the worker to finish its running jobs; further calls do nothing."""
        if not self._stopping:
            self._stopping = True
            self.stop_now()

    def stop_now(self) -> None:
        """Signal the worker; after :meth:`stop` it stops at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait until the worker has ended; return its exit code."""
        return await self._watch if self._watch is not None else CLEAN
