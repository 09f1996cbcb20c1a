"""The storm, small; the whole one is ``make storm``. ``test_faults`` storms all brokers."""

from __future__ import annotations

from pathlib import Path

import pytest
from storm import LEAST, storm


@pytest.mark.everyday
@pytest.mark.parametrize("broker", ["lmdb", "redis", "postgresql", "rabbitmq", "http"])
def test_a_small_storm(tmp_path: Path, broker: str) -> None:  # case Q20
    path = tmp_path / "p"
    path.mkdir()
    kills = 8 if broker == "lmdb" else 4  # a server takes seconds to come back
    table = storm(path, seed=4, kills=kills, broker=broker)
    assert table["runs"] >= LEAST
