"""Apps to test with, on every broker that needs no server; and the LMDB store by itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemill import Tidemill
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker

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


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of an LMDB store, removed afterwards: some grow large."""
    yield f"lmdb://{tmp_path}/store"
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def broker(url: str) -> Iterator[LmdbBroker]:
    """On that store."""
    broker = open_broker(url)
    yield broker
    broker.close()
