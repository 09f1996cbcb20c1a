"""Which brokers the suite runs on, and the clock a test may move. A broker joins by one line."""

from __future__ import annotations

import importlib
import time

import msgspec
import pytest


class Kind(msgspec.Struct, frozen=True):
    """One broker under test: its URL (``{dir}`` is a fresh directory), and who reads the clock."""

    name: str
    url: str
    clocks: tuple[str, ...] = ()


KINDS = [
    Kind("memory", "memory://", ("tidemill.brokers.memory.jobs",)),
    Kind("lmdb", "lmdb://{dir}/store", ("tidemill.brokers.lmdb.storetime",)),
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
