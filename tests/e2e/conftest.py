"""An app for the tests of messages, on every broker that needs no server, or none but ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import forget_served, served

from tidemill import Tidemill


@pytest.fixture(params=["memory", "lmdb", "http"])
def mill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tidemill]:
    url = "memory://" if request.param == "memory" else f"lmdb://{tmp_path}/store"
    with Tidemill(served(url) if request.param == "http" else url) as mill:
        yield mill
    forget_served(tmp_path)
