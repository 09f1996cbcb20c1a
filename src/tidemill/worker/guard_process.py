"""The guard: a tiny process that kills the programs that a killed supervisor leaves behind.

When a supervisor dies, the kernel kills its worker processes, but not the programs that their tasks
have started. The guard reads the process groups in use from a pipe. When the pipe ends, the guard
kills all processes left in these groups. The guard has a session of its own: a signal to a terminal
or to the worker's group does not reach the guard.
"""

from __future__ import annotations

import subprocess
import sys

PATIENCE = 5.0
"""Seconds to wait for the end of the guard."""

_CODE = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    group = int(line)
    groups.add(group) if group > 0 else groups.discard(-group)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class GuardProcess:
    """The supervisor's end of the pipe."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, group: int) -> None:
        """Have a process group killed when this process dies."""
        self._groups.add(group)
        self._tell(group)

    def remove(self, group: int) -> None:
        """Forget a process group that is gone; another group may soon have its number."""
        self._groups.discard(group)
        self._tell(-group)

    def _tell(self, number: int) -> None:
        if self._process is None or not self._write(f"{number}\n"):
            self._start()  # the first time, or after somebody killed the guard
            self._write("".join(f"{group}\n" for group in self._groups))

    def _start(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _write(self, text: str) -> bool:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except OSError:
            return False
        return True

    def reap(self, pid: int) -> bool:
        """If the process is the guard, reap the process and return True."""
        if self._process is None or self._process.pid != pid:
            return False
        self._process.wait()
        return True

    def close(self) -> None:
        """End the guard, which kills the groups that still exist."""
        if self._process is not None:
            assert self._process.stdin is not None
            try:
                self._process.stdin.close()
            except OSError:
                pass
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                pass  # the guard ends by itself when the pipe ends
            self._process = None
