"""Our port answers as beanstalkd does: the same commands to both, compared answer by answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from beanstalk_pair import Pair
from port_here import port_of
from servers.beanstalk import Beanstalkd

from tidemill import Tidemill

STEPS = int(os.environ.get("TIDEMILL_BEANSTALK_STEPS", "1500"))
FIRST = int(os.environ.get("TIDEMILL_BEANSTALK_FIRST", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("TIDEMILL_BEANSTALK_SEEDS", "2")))


@pytest.fixture
def theirs() -> Iterator[Beanstalkd]:
    server = Beanstalkd()
    yield server
    server.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands_are_answered_alike(theirs: Beanstalkd, tmp_path: Path, seed: int) -> None:
    with Tidemill(f"lmdb://{tmp_path}/jobs?durability=relaxed") as mill, port_of(mill) as ours:
        pair = Pair(theirs.port, ours.number, 4, seed)
        try:
            for _ in range(STEPS):
                pair.step()
        finally:
            pair.close()


# -- clients ---------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


def test_the_suite_of_a_python_client_passes(tmp_path: Path) -> None:
    # case W4
    with Tidemill(f"lmdb://{tmp_path}/jobs?durability=relaxed") as mill, port_of(mill) as port:
        command = [sys.executable, "scripts/clients", "--port", str(port.number), "pystalkd"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 9 tests" in done.stderr
    assert "pystalkd: passed" in done.stdout
