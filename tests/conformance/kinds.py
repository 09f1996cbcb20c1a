"""Which brokers the suite runs on, and the clock a test may move. A broker joins by one line."""

from __future__ import annotations

import hashlib
import importlib
import time
from pathlib import Path

import msgspec
import pytest
from servers import postgres_url, rabbitmq_url, redis_url


class Kind(msgspec.Struct, frozen=True):
    """One broker under test: its URL, and who reads the clock.

    In the URL ``{dir}`` stands for a fresh directory, ``{name}`` for its name, ``{redis}``,
    ``{postgres}`` and ``{rabbitmq}`` for servers that are started when first asked for.
    ``volatile`` is a broker that is as durable as its server, when those of the tests keep nothing
    on disk. ``cannot`` names promises it does not keep though no feature stands for them; tests say
    that they need one by the same words.
    """

    name: str
    url: str
    clocks: tuple[str, ...] = ()
    volatile: bool = False
    cannot: frozenset[str] = frozenset()

    def store_url(self, folder: Path | str, query: str = "") -> str:
        """The URL of the store that belongs to a directory, with options."""
        url = self.url
        url = url.replace("{dir}", str(folder)).replace("{name}", unique(str(folder)))
        for mark, find in SERVERS.items():
            if mark in url:
                url = url.replace(mark, find())
        if query:
            url += ("&" if "?" in url else "?") + query
        return url


def unique(folder: str) -> str:
    """A name for the store of a directory, good for a prefix or a schema."""
    return "t" + hashlib.sha1(folder.encode()).hexdigest()[:16]


SERVERS = {"{redis}": redis_url, "{postgres}": postgres_url, "{rabbitmq}": rabbitmq_url}

NOT_BY_RABBITMQ = frozenset(
    {
        "a retry keeps its place",  # it is another message, and stands behind those that are there
        "one order of tasks and messages",
        "a witness",  # the server gives back what a dead worker had, and hears no account of it
        "commands",
        "exact turns",  # what has arrived is taken, whosever turn it is
    }
)

KINDS = [
    Kind("memory", "memory://", ("tidemill.brokers.memory.jobs",)),
    Kind("lmdb", "lmdb://{dir}/store", ("tidemill.brokers.lmdb.storetime",)),
    Kind("redis", "{redis}?prefix={name}", ("tidemill.brokers.redis.servertime",), volatile=True),
    Kind(
        "postgresql",
        "{postgres}?schema={name}&migrate=1",
        ("tidemill.brokers.postgres.servertime",),
        volatile=True,
    ),
    Kind("rabbitmq", "{rabbitmq}?prefix={name}", cannot=NOT_BY_RABBITMQ),
]


LONGEST = 2.0
"""Seconds a test may really pass."""


class Clock:
    """The broker's clocks, which a test may move; where they cannot be, time passes really."""

    def __init__(self, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        self._wall = self._machine = 0.0
        self._monkeypatch = monkeypatch
        self.fake = bool(modules)
        self.of_server = any(name.endswith(".servertime") for name in modules)
        self.rule(modules)

    def rule(self, modules: tuple[str, ...]) -> None:
        """Be the clock of some modules."""
        clock = importlib.import_module("tidemill.clock")
        wall, machine = clock.wall_time, clock.machine_time
        for name in modules:
            module = importlib.import_module(name)
            for attribute, read in (
                ("wall_time", lambda: wall() + self._wall),
                ("machine_time", lambda: machine() + self._machine),
                ("server_offset", lambda: self._machine),
            ):
                if hasattr(module, attribute):
                    self._monkeypatch.setattr(module, attribute, read)

    @property
    def wall(self) -> float:
        """Seconds by which the wall clock is ahead of the real one."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Time passes."""
        if not self.fake:
            if seconds > LONGEST:
                pytest.skip(f"{seconds:g} s, which the clock of this broker cannot be moved by")
            time.sleep(seconds)
        self._wall += seconds
        self._machine += seconds

    def set_wall(self, seconds: float) -> None:
        """Somebody sets the wall clock forward, or back. Only where clocks are fake."""
        if not self.fake:
            pytest.skip("the clock of this broker cannot be set")
        self._wall += seconds
