"""Stores that a test can keep from answering: a server is stopped or paused, a table locked."""

from __future__ import annotations

import contextlib
import sqlite3
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from harness import Place, open_place
from servers import Redis, django_on_postgres, django_on_sqlite, postgres_url
from servers.http import JobServer

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
def _lmdb(path: Path) -> Iterator[tuple[str, Lock]]:
    yield f"lmdb://{path}/store", lmdb_locked


@contextlib.contextmanager
def _redis(path: Path) -> Iterator[tuple[str, Lock]]:
    with contextlib.closing(Redis()) as server:
        yield server.url, lambda place: server.stalled()


@contextlib.contextmanager
def _http(path: Path) -> Iterator[tuple[str, Lock]]:
    with contextlib.closing(JobServer("--quiet")) as server:
        yield server.url, lambda place: server.stalled()


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
    "redis": _redis,
    "http": _http,
}


@contextlib.contextmanager
def open_stalling(kind: str, path: Path, query: str = "") -> Iterator[tuple[Place, Lock]]:
    """A place on a store of its own, and how to keep that from answering."""
    folder = path / "p"
    folder.mkdir()
    with KINDS[kind](folder) as (url, lock), open_place(folder, url + query) as place:
        yield place, lock
