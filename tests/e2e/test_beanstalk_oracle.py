"""Our port answers as beanstalkd does: the same commands to both, compared answer by answer.

And far more of them to ours alone, held to what must be true of any answer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from beanstalk_flood import Flood
from beanstalk_pair import Pair
from port_here import port_of
from servers import free_port
from servers.beanstalk import Beanstalkd
from servers.http import JobServer

from tidemill import Tidemill

STEPS = int(os.environ.get("TIDEMILL_BEANSTALK_STEPS", "1500"))
FLOOD = int(os.environ.get("TIDEMILL_BEANSTALK_FLOOD", "5000"))
FIRST = int(os.environ.get("TIDEMILL_BEANSTALK_FIRST", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("TIDEMILL_BEANSTALK_SEEDS", "2")))


@pytest.fixture
def theirs() -> Iterator[Beanstalkd]:
    server = Beanstalkd()
    yield server
    server.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands_are_answered_alike(theirs: Beanstalkd, tmp_path: Path, seed: int) -> None:
    with (
        Tidemill(f"lmdb://{tmp_path}/jobs?durability=relaxed") as mill,
        port_of(mill) as ours,
    ):
        pair = Pair(theirs.port, ours.number, 4, seed)
        try:
            for _ in range(STEPS):
                pair.step()
        finally:
            pair.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flood_of_commands_and_bytes_loses_nothing(tmp_path: Path, seed: int) -> None:
    # law 1
    number = free_port()
    where = f"lmdb://{tmp_path}/store?durability=relaxed"
    server = JobServer("--beanstalk", f"127.0.0.1:{number}", "--quiet", where=where)
    try:
        flood = Flood(number, seed)
        try:
            flood.run(FLOOD)
        finally:
            flood.close()
        server.kill()
        server.start()
        flood.settle()
        assert server.end() == 0
    finally:
        server.close()
