"""Which brokers the suite runs on, and the clock a test may move. A broker joins by one line."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import msgspec
import pytest
from moved_clock import MovedClock
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
    """One broker under test: its URL, and whose clock it goes by.

    In the URL ``{dir}`` stands for a fresh directory, ``{name}`` for its name, ``{redis}``,
    ``{postgres}`` and ``{rabbitmq}`` for servers that are started when first asked for.
    A test may move the clocks of a broker if they are ``fake``. A clock ``of_server`` does not
    follow when somebody sets the clock of this machine. ``volatile`` is a broker that is as durable
    as its server, when those of the tests keep nothing on disk. ``cannot`` names promises it does
    not keep though no feature stands for them; tests say that they need one by the same words. What
    is ``served`` is reached through a job server.
    """

    name: str
    url: str
    fake: bool = True
    of_server: bool = False
    volatile: bool = False
    cannot: frozenset[str] = frozenset()
    served: bool = False

    def store_url(self, folder: Path | str, query: str = "") -> str:
        """The URL of the store that belongs to a directory, with options."""
        url = filled(self.url, folder)
        if query:
            url += ("&" if "?" in url else "?") + query
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

DJANGO_ELSEWHERE = {
    "TIDEMILL_TEST_DJANGO": Kind("django+postgresql", "{django-postgres}", of_server=True),
    "TIDEMILL_TEST_MARIADB": Kind("django+mariadb", "{django-mariadb}", of_server=True),
}
"""The broker on other databases than SQLite: run when a variable asks, since each takes long."""

KINDS = [
    Kind("memory", "memory://"),
    Kind("lmdb", "lmdb://{dir}/store"),
    Kind("redis", "{redis}?prefix={name}", of_server=True, volatile=True),
    Kind("postgresql", "{postgres}", of_server=True, volatile=True),
    Kind("rabbitmq", "{rabbitmq}?prefix={name}", fake=False, cannot=NOT_BY_RABBITMQ),
    Kind("django", "{sqlite}", of_server=True),
    *(kind for name, kind in DJANGO_ELSEWHERE.items() if name in os.environ),
    Kind("http", "lmdb://{dir}/store", served=True),
]


LONGEST = 2.0
"""Seconds a test may really pass."""

STILL = 0.01
"""The speed of a clock that all but stands still by itself."""


class Clock(MovedClock):
    """The clocks of a broker; where a test cannot move them, time passes really."""

    def __init__(self, kind: Kind, monkeypatch: pytest.MonkeyPatch, speed: float = 1.0) -> None:
        super().__init__(monkeypatch, speed if kind.fake else 1.0)
        self.fake = kind.fake
        self.of_server = kind.of_server

    def advance(self, seconds: float) -> None:
        """Time passes."""
        if self.fake:
            super().advance(seconds)
        elif seconds > LONGEST:
            pytest.skip(f"{seconds:g} s, which the clock of this broker cannot be moved by")
        else:
            time.sleep(seconds)

    def set_wall(self, seconds: float) -> None:
        """Somebody sets the wall clock forward, or back. Only where clocks are fake."""
        if not self.fake:
            pytest.skip("the clock of this broker cannot be set")
        super().set_wall(seconds)
