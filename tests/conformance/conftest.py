"""Which brokers the suite runs on. A new broker joins by one line in ``KINDS``."""

from __future__ import annotations

import importlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from seam import Hand, check_counts

from tidemill.brokers.base import Broker, Feature, open_broker


class Kind(msgspec.Struct, frozen=True):
    """One broker under test: its URL (``{dir}`` is a fresh directory), and who reads the clock."""

    name: str
    url: str
    clocks: tuple[str, ...] = ()


KINDS = [
    Kind("memory", "memory://", ("tidemill.brokers.memory",)),
    Kind(
        "lmdb",
        "lmdb://{dir}/store",
        ("tidemill.brokers.lmdb.broker", "tidemill.brokers.lmdb.inspect"),
    ),
]


class Clock:
    """The broker's clocks, which a test may move; where they cannot be, time passes really."""

    def __init__(self, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self._wall = self._machine = 0.0
        self.fake = bool(modules)
        clock = importlib.import_module("tidemill.clock")
        wall, machine = clock.wall_time, clock.machine_time
        for name in modules:
            module = importlib.import_module(name)
            for attribute, read in (
                ("wall_time", lambda: wall() + self._wall),
                ("machine_time", lambda: machine() + self._machine),
            ):
                if hasattr(module, attribute):
                    monkeypatch.setattr(module, attribute, read)

    def advance(self, seconds: float) -> None:
        """Time passes."""
        if not self.fake:
            time.sleep(seconds)
        self._wall += seconds
        self._machine += seconds

    def set_wall(self, seconds: float) -> None:
        """Somebody sets the wall clock forward, or back. Only where clocks are fake."""
        if not self.fake:
            pytest.skip("the clock of this broker cannot be set")
        self._wall += seconds


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def clock(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(kind.clocks, monkeypatch)


@pytest.fixture
def open_store(kind: Kind, tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """Open the broker, with options for its URL. Its counters are recounted at the end."""
    opened: list[Broker] = []

    def open_one(**options: object) -> Broker:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        url = kind.url.format(dir=tmp_path) + (f"?{query}" if query else "")
        opened.append(open_broker(url))
        return opened[-1]

    yield open_one
    for broker in opened:
        check_counts(broker)
        broker.close()
        broker.close()  # idempotent
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def broker(clock: Clock, open_store: Callable[..., Broker]) -> Broker:
    return open_store()


@pytest.fixture
def worker(broker: Broker) -> Hand:
    return Hand(broker)


@pytest.fixture
def consumer(broker: Broker) -> Hand:
    return Hand(broker, "c1", "consumer")


@pytest.fixture
def need(kind: Kind, broker: Broker) -> Callable[[Feature], None]:
    """Skip the test when the broker lacks a feature; the table of features is frozen elsewhere."""

    def check(feature: Feature) -> None:
        if feature not in broker.features:
            pytest.skip(f"{kind.name} has no {feature}")

    return check
