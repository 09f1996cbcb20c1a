"""``manage.py tidemill dev``: runserver and a worker, two programs that end together.

This process starts both programs and watches them. Its signals arrive as bytes in a socket, as in a
worker. A signal handler that raises would be unsafe: the exception could get lost in an import, or
leave a program running.

Both programs have their own sessions, so a Ctrl-C of the terminal reaches only this process. The
reloader of ``runserver`` starts the server as a second process. A signal may end the reloader and
leave this server running. So at the end, the site's whole process group is killed. When this
process is killed, the worker ends by ``--ends-with``, and a guard kills the site's group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tidemill.brokers.shared.wake_pipe import readable
from tidemill.core.signals import Signals

_STOPS = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP}

_GUARDED = """
import os, signal, sys

pipe, program = int(sys.argv[1]), sys.argv[2:]
if os.fork() == 0:
    while os.read(pipe, 1):
        pass
    os.kill(0, signal.SIGKILL)  # 0 stands for all processes of this group
os.close(pipe)
os.execv(program[0], program)
"""
"""The first program of the site's process group. It starts the guard, and becomes the site.

The guard reads a pipe, of which only ``manage.py tidemill dev`` has the writing end. So the guard
reads end-of-file when the command dies, even by ``kill -9``. The guard then kills the group: the
reloader of ``runserver``, the server, and itself.
"""

_WORKER_PATIENCE, _SITE_PATIENCE = 30.0, 5.0  # seconds that each has to end


def develop(site: Sequence[str], worker: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the site and the worker until the site ends or a signal stops this process."""
    # Returns the exit code.
    signals = Signals()
    undo = signals.install()
    started: list[tuple[subprocess.Popen[bytes], float]] = []
    guarded, held = os.pipe()  # the guard reads end-of-file when this process is gone
    try:
        beside = subprocess.Popen(
            [*worker, "--ends-with", str(os.getpid())],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.append((beside, _WORKER_PATIENCE))
        served = subprocess.Popen(
            [sys.executable, "-ISc", _GUARDED, str(guarded), *site],
            env=environment,
            start_new_session=True,
            pass_fds=[guarded],
        )
        started.append((served, _SITE_PATIENCE))
        return _await_end(served, signals)
    finally:
        _end(started, signals)
        for program, _ in started[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
        os.close(guarded)
        os.close(held)
        undo()
        signals.close()


def _await_end(site: subprocess.Popen[bytes], signals: Signals) -> int:
    """Wait until the site ends, or a signal arrives; returns the exit code."""
    while site.poll() is None:
        if _is_told_to_stop(signals, None):
            return 0
    return site.returncode if site.returncode >= 0 else 128 - site.returncode


def _end(started: list[tuple[subprocess.Popen[bytes], float]], signals: Signals) -> None:
    """End all programs. A program that does not end within its time is killed."""
    # A further signal kills all programs at once.
    for program, _ in started:
        program.terminate()
    now = time.monotonic()
    waiting = [(program, now + patience) for program, patience in started]
    while waiting := [each for each in waiting if each[0].poll() is None]:
        left = min(until for _, until in waiting) - time.monotonic()
        at_once = _is_told_to_stop(signals, max(0.0, left))
        for program, until in waiting:
            if at_once or time.monotonic() >= until:
                program.kill()
                program.wait()


def _is_told_to_stop(signals: Signals, seconds: float | None) -> bool:
    """Sleep until a signal arrives; True for a signal to stop, False for a program's end."""
    readable([signals.fileno()], seconds)
    return not _STOPS.isdisjoint(signals.take())
