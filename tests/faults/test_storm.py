"""The storm, small; the whole one is ``make storm``. ``test_faults`` storms all brokers."""

from __future__ import annotations

from pathlib import Path

import pytest
from storm import LEAST, storm


@pytest.mark.parametrize("broker", ["lmdb", "rabbitmq"])
def test_a_small_storm(tmp_path: Path, broker: str) -> None:  # case Q20
    path = tmp_path / "p"
    path.mkdir()
    kills = 4 if broker == "rabbitmq" else 8  # its server takes seconds to come back
    table = storm(path, seed=4, kills=kills, broker=broker)
    assert table["runs"] >= LEAST
