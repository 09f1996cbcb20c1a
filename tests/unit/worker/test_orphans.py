"""A worker process whose socket has closed learns whether its supervisor has died."""

from __future__ import annotations

import subprocess
import sys

PARENT_DIES_LATER = """
import os, time
from tidemill.worker.zombie_reaper import is_orphan
parent = os.getpid()
if os.fork():
    time.sleep(0.1)
    os._exit(0)
print(is_orphan(parent))
"""
PARENT_LIVES = """
import os
from tidemill.worker.zombie_reaper import is_orphan
parent = os.getpid()
child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    print(is_orphan(parent))
"""


def test_a_process_waits_for_a_supervisor_that_is_dying() -> None:
    assert _printed(PARENT_DIES_LATER) == "True"


def test_a_process_with_a_living_supervisor_is_no_orphan() -> None:
    assert _printed(PARENT_LIVES) == "False"


def _printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    return done.stdout.strip()
