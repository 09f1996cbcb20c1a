"""Apps to test with, on every broker that needs no server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemill import Tidemill

MillMaker = Callable[..., Tidemill]


@pytest.fixture(params=["memory", "lmdb"])
def make_mill(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MillMaker]:
    """Make an app on the broker; apps with the same ``at`` share an LMDB directory."""
    made: list[Tidemill] = []

    def make(*, at: str = "store", **options: Any) -> Tidemill:
        url = "memory://" if request.param == "memory" else f"lmdb://{tmp_path}/{at}"
        made.append(Tidemill(url, **options))
        return made[-1]

    yield make
    for mill in made:
        mill.close()
        mill.close()  # idempotent


@pytest.fixture
def mill(make_mill: MillMaker) -> Tidemill:
    return make_mill()
