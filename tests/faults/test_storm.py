"""The storm, small: the whole one is ``make storm``."""

from __future__ import annotations

from pathlib import Path

from storm import storm


def test_a_small_storm(tmp_path: Path) -> None:  # case Q20
    path = tmp_path / "p"
    path.mkdir()
    table = storm(path, seed=4, kills=16)
    assert table["succeeded"] > 100
