"""A simulation for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulator import Simulation, simulation


@pytest.fixture
def sim() -> Iterator[Simulation]:
    with simulation() as made:
        yield made
