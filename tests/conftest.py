"""A place for each test: store, app, workers; everything ended afterwards."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Place, open_place

os.environ.pop("COLUMNS", None)  # which tests in several processes find set

_numbers = itertools.count()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / f"p{next(_numbers)}"
    folder.mkdir()
    with open_place(folder) as place:
        yield place
