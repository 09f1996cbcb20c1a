"""Stores that a test can keep from answering: a server is stopped or paused, a table locked."""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from harness import Place, open_place
from servers import (
    NETWORK,
    RabbitMQ,
    Redis,
    django_on_postgres,
    django_on_sqlite,
    postgres_url,
)
from servers.http import JobServer

from tidemill.core.clock import new_id

Lock = Callable[[Place], contextlib.AbstractContextManager[None]]
"""Keeps the store of a place from answering for the time of a block."""


@contextlib.contextmanager
def lmdb_locked(place: Place) -> Iterator[None]:
    """Another process would be the same: the store has one write lock."""
    broker: Any = place.mill.broker
    with broker._store.env.begin(write=True) as txn:
        yield
        txn.abort()


@contextlib.contextmanager
def _table_locked(place: Place) -> Iterator[None]:
    schema = place.url.partition("schema=")[2].partition("&")[0]
    with psycopg.connect(place.url.partition("?")[0]) as other:
        other.execute(f"lock table {schema}.lease in access exclusive mode")
        yield
        other.rollback()


@contextlib.contextmanager
def _lmdb(path: Path) -> Iterator[tuple[str, Lock]]:
    yield f"lmdb://{path}/store", lmdb_locked


@contextlib.contextmanager
def _postgresql(path: Path) -> Iterator[tuple[str, Lock]]:
    yield NETWORK["postgresql"]("t" + new_id()), _table_locked


@contextlib.contextmanager
def _redis(path: Path) -> Iterator[tuple[str, Lock]]:
    with contextlib.closing(Redis()) as server:
        yield server.url, lambda place: server.stalled()


@contextlib.contextmanager
def _redis_paused(path: Path) -> Iterator[tuple[str, Lock]]:
    """It answers pings, and keeps scripts waiting."""

    @contextlib.contextmanager
    def paused(place: Place) -> Iterator[None]:
        server.run("CLIENT", "PAUSE", "600000", "WRITE")
        try:
            yield
        finally:
            server.run("CLIENT", "UNPAUSE")

    with contextlib.closing(Redis()) as server:
        yield server.url, paused


@contextlib.contextmanager
def _http(path: Path) -> Iterator[tuple[str, Lock]]:
    with contextlib.closing(JobServer("--quiet")) as server:
        yield server.url, lambda place: server.stalled()


@functools.cache
def _own_rabbitmq() -> RabbitMQ:
    """Of this process alone, for all its tests: to start one takes seconds."""
    return RabbitMQ()


@contextlib.contextmanager
def _rabbitmq(path: Path) -> Iterator[tuple[str, Lock]]:
    server = _own_rabbitmq()
    yield f"{server.url}?prefix=t{new_id()[-12:]}", lambda place: server.stalled()


@contextlib.contextmanager
def _django_sqlite(path: Path) -> Iterator[tuple[str, Lock]]:
    @contextlib.contextmanager
    def locked(place: Place) -> Iterator[None]:
        file = path / "django.sqlite3"
        with contextlib.closing(sqlite3.connect(file, isolation_level=None, timeout=60)) as other:
            other.execute("BEGIN EXCLUSIVE")
            yield
            other.execute("ROLLBACK")

    yield django_on_sqlite(str(path)), locked


@contextlib.contextmanager
def _django_postgresql(path: Path) -> Iterator[tuple[str, Lock]]:
    url = django_on_postgres(str(path))
    database = url.removeprefix("django://")
    server = urllib.parse.urlsplit(postgres_url())._replace(path=f"/{database}").geturl()

    @contextlib.contextmanager
    def locked(place: Place) -> Iterator[None]:
        with psycopg.connect(server) as other:
            other.execute("LOCK TABLE tidemill_job IN ACCESS EXCLUSIVE MODE")
            yield
            other.rollback()

    yield url, locked


KINDS = {
    "django-sqlite": _django_sqlite,
    "django-postgresql": _django_postgresql,
    "lmdb": _lmdb,
    "postgresql": _postgresql,
    "redis": _redis,
    "redis-paused": _redis_paused,
    "http": _http,
    "rabbitmq": _rabbitmq,
}


@contextlib.contextmanager
def open_stalling(kind: str, path: Path, query: str = "") -> Iterator[tuple[Place, Lock]]:
    """A place on a store of its own, and how to keep that from answering."""
    folder = path / "p"
    folder.mkdir()
    with KINDS[kind](folder) as (url, lock), open_place(folder, url + query) as place:
        yield place, lock
