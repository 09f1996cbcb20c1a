"""Which brokers the suite runs on, and the clock a test may move. A broker joins by one line."""

from __future__ import annotations

import hashlib
import importlib
import os
import time
import urllib.parse
from pathlib import Path

import msgspec
import pytest
from servers import (
    django_on_mariadb,
    django_on_postgres,
    django_on_sqlite,
    postgres_store,
    rabbitmq_url,
    redis_url,
    served,
)


class Kind(msgspec.Struct, frozen=True):
    """One broker under test: its URL, and who reads the clock.

    In the URL ``{dir}`` stands for a fresh directory, ``{name}`` for its name, ``{redis}``,
    ``{postgres}`` and ``{rabbitmq}`` for servers that are started when first asked for.
    ``volatile`` is a broker that is as durable as its server, when those of the tests keep nothing
    on disk. ``cannot`` names promises it does not keep though no feature stands for them; tests say
    that they need one by the same words. What is ``served`` is reached through a job server; a
    ``carrier`` brings what is ready in the store.
    """

    name: str
    url: str
    clocks: tuple[str, ...] = ()
    volatile: bool = False
    cannot: frozenset[str] = frozenset()
    served: bool = False
    carrier: str = ""

    def store_url(self, folder: Path | str, query: str = "") -> str:
        """The URL of the store that belongs to a directory, with options."""
        url = filled(self.url, folder)
        if query:
            url += ("&" if "?" in url else "?") + query
        if self.carrier:
            url = f"{filled(self.carrier, folder)}&store={urllib.parse.quote(url, safe='')}"
        return served(url) if self.served else url


def filled(url: str, folder: Path | str) -> str:
    """A URL with what its braces stand for."""
    name = unique(str(folder))
    url = url.replace("{dir}", str(folder)).replace("{name}", name)
    for mark, make in DJANGO.items():
        if mark in url:
            url = url.replace(mark, make(str(folder)))
    if "{postgres}" in url:
        url = url.replace("{postgres}", postgres_store(name))
    for mark, find in SERVERS.items():
        if mark in url:
            url = url.replace(mark, find())
    return url


def unique(folder: str) -> str:
    """A name for the store of a directory, good for a prefix or a database."""
    return "t" + hashlib.sha1(folder.encode()).hexdigest()[:16]


DJANGO = {
    "{sqlite}": django_on_sqlite,
    "{django-postgres}": django_on_postgres,
    "{django-mariadb}": django_on_mariadb,
}
SERVERS = {"{redis}": redis_url, "{rabbitmq}": rabbitmq_url}

NOT_BY_RABBITMQ = frozenset(
    {
        "a retry keeps its place",  # it is another message, and stands behind those that are there
        "one order of tasks and messages",
        "a witness",  # the server gives back what a dead worker had, and hears no account of it
        "commands",
        "exact turns",  # what has arrived is taken, whosever turn it is
    }
)

NOT_IF_CARRIED = frozenset(
    {
        "a retry keeps its place",  # it goes behind what is carried already
        "one order of tasks and messages",  # messages are not carried
        "exact turns",
        "the next in one step",  # it is carried, too
        "what was lost comes first",  # it has a place of its own there
        "what goes back keeps its place",  # it stands behind what is carried by then
        "no more at a time than may fail yet",  # what was carried by the first failure starts
    }
)

DJANGO_CLOCK = ("tidemill.brokers.django.server_clock",)
DJANGO_ELSEWHERE = {
    "TIDEMILL_TEST_DJANGO": Kind("django+postgresql", "{django-postgres}", DJANGO_CLOCK),
    "TIDEMILL_TEST_MARIADB": Kind("django+mariadb", "{django-mariadb}", DJANGO_CLOCK),
}
"""The broker on other databases than SQLite: run when a variable asks, since each takes long."""

KINDS = [
    Kind("memory", "memory://", ("tidemill.brokers.memory.transitions",)),
    Kind("lmdb", "lmdb://{dir}/store", ("tidemill.brokers.lmdb.store_clock",)),
    Kind("redis", "{redis}?prefix={name}", ("tidemill.brokers.redis.server_clock",), volatile=True),
    Kind(
        "postgresql",
        "{postgres}",
        ("tidemill.brokers.postgres.server_clock",),
        volatile=True,
    ),
    Kind("rabbitmq", "{rabbitmq}?prefix={name}", cannot=NOT_BY_RABBITMQ),
    Kind("django", "{sqlite}", DJANGO_CLOCK),
    *(kind for name, kind in DJANGO_ELSEWHERE.items() if name in os.environ),
    Kind(
        "http",
        "lmdb://{dir}/store",
        ("tidemill.brokers.lmdb.store_clock", "tidemill.server.http.broker_rpc"),
        served=True,
    ),
    Kind(
        "rabbitmq+lmdb",
        "lmdb://{dir}/store",
        ("tidemill.brokers.lmdb.store_clock", "tidemill.brokers.carrier.worker"),
        cannot=NOT_IF_CARRIED,
        carrier="{rabbitmq}?prefix={name}",
    ),
]


LONGEST = 2.0
"""Seconds a test may really pass."""

STILL = 0.01
"""The speed of a clock that all but stands still by itself."""


class Clock:
    """The broker's clocks, which a test may move; where they cannot be, time passes really.

    By themselves they go at ``speed``, which is that of time itself unless said.
    """

    def __init__(
        self, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, speed: float = 1.0
    ) -> None:
        self._wall = self._machine = 0.0
        self._since, self._lag = time.monotonic(), 1.0 - speed
        self._monkeypatch = monkeypatch
        self.fake = bool(modules)
        self.of_server = any(name.endswith(".server_clock") for name in modules)
        self.rule(modules)

    def rule(self, modules: tuple[str, ...]) -> None:
        """Be the clock of some modules."""
        clock = importlib.import_module("tidemill.core.clock")
        wall, machine = clock.wall_time, clock.machine_time
        for name in modules:
            module = importlib.import_module(name)
            for attribute, read in (
                ("wall_time", lambda: wall() + self.wall),
                ("machine_time", lambda: machine() + self.machine),
                ("server_offset", lambda: self.machine),
            ):
                if hasattr(module, attribute):
                    self._monkeypatch.setattr(module, attribute, read)

    @property
    def wall(self) -> float:
        """Seconds by which the wall clock is ahead of the real one."""
        return self._wall - self._behind()

    @property
    def machine(self) -> float:
        """Seconds by which the machine's clock, or the server's, is ahead of the real one."""
        return self._machine - self._behind()

    def _behind(self) -> float:
        return self._lag * (time.monotonic() - self._since) if self._lag else 0.0

    def now(self) -> float:
        """The wall time by the broker's clock."""
        return time.time() + self.wall

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
