"""An app for the tests of messages, on every broker that needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill import Tidemill


@pytest.fixture(params=["memory", "lmdb"])
def mill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tidemill]:
    url = "memory://" if request.param == "memory" else f"lmdb://{tmp_path}/store"
    with Tidemill(url) as mill:
        yield mill
