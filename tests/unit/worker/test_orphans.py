"""A worker process whose socket has closed learns whether its supervisor has died."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tidemill.worker import zombie_reaper

pytestmark = pytest.mark.everyday

PARENT_DIES_LATER = """
import os, time
from tidemill.worker import zombie_reaper
parent = os.getpid()
read, write = os.pipe()
if os.fork():
    os.read(read, 1)
    os._exit(0)
pauses = []
def parent_dies(pause):
    pauses.append(pause)
    os.write(write, b"x")  # the first look has found the parent alive
    while os.getppid() == parent:
        time.sleep(0.001)
zombie_reaper.sleep = parent_dies
print(zombie_reaper.is_orphan(parent), len(pauses))
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
    # when the supervisor dies after the first look, then the second look sees its death
    assert _printed(PARENT_DIES_LATER) == "True 1"
    assert zombie_reaper._LOOKS * zombie_reaper._PAUSE > 0.1


def test_a_process_with_a_living_supervisor_is_no_orphan() -> None:
    assert _printed(PARENT_LIVES) == "False"


def _printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    return done.stdout.strip()
