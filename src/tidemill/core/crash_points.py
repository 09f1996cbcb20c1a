"""Named points at which a test can kill the process, as by ``kill -9``.

``TIDEMILL_CRASH=name:N`` kills a process when it passes the point ``name`` for the Nth time.
``name:N%`` kills at each passing with probability 1/N; this N is not a percentage. Before its
death, the process adds a line to the file that ``TIDEMILL_CRASH_LOG`` names. Without these
variables a point costs one comparison. Points are only in code that runs once for a batch.
"""

from __future__ import annotations

import os
import random
import signal
import time

_NAME, _, _COUNT = os.environ.get("TIDEMILL_CRASH", "").partition(":")
_LOG = os.environ.get("TIDEMILL_CRASH_LOG", "")
_CHANCE = _COUNT.endswith("%")
_left = int(_COUNT.rstrip("%") or 1)


def point(name: str) -> None:
    """Kill this process if ``TIDEMILL_CRASH`` chose this point and this passing."""
    if name == _NAME:
        _pass()


def _pass() -> None:
    global _left
    if _CHANCE:
        if random.randrange(_left):
            return
    else:
        _left -= 1
        if _left:
            return
    if _LOG:
        fd = os.open(_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, f"{_NAME} {os.getpid()} {time.time()!r}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
