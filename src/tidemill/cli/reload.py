"""``tidemill worker --reload``, for development: a thread checks the .py files every second."""

from __future__ import annotations

import logging
import os
import signal
import threading

log = logging.getLogger("tidemill.reload")

EVERY = 1.0  # seconds between two checks
_SKIPPED = {"__pycache__", "node_modules", "venv", "site-packages"}


def snapshot(folder: str) -> dict[str, tuple[int, int]]:
    """(time of change, size) of every .py file below a folder; hidden folders are left out."""
    seen = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(parent, name)
                try:
                    stat = os.stat(path)
                except OSError:  # the file was just deleted, and the next check notices that
                    continue
                seen[path] = stat.st_mtime_ns, stat.st_size
    return seen


def watch(folder: str, first: dict[str, tuple[int, int]]) -> None:
    """Send this process a HUP, which reloads the worker, after each change of a .py file.

    ``first`` is a snapshot of the folder.
    """

    def check() -> None:
        before = first
        pause = threading.Event()
        while not pause.wait(EVERY):
            now = snapshot(folder)
            changed = sorted({path for path, _ in before.items() ^ now.items()})
            if changed:
                log.info("%s changed", ", ".join(os.path.relpath(p, folder) for p in changed[:3]))
                os.kill(os.getpid(), signal.SIGHUP)
            before = now

    threading.Thread(target=check, name="tidemill-reload", daemon=True).start()
