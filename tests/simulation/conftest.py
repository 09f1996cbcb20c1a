"""A simulation for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulator import Simulation, simulation


@pytest.fixture
def sim(caplog: pytest.LogCaptureFixture) -> Iterator[Simulation]:
    caplog.set_level("INFO", logger="tidemill")
    with simulation(lambda: [record.getMessage() for record in caplog.records]) as made:
        yield made
