"""Databases of a Django project with migrated tables, for the broker ``django://``."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .postgres import Postgres


def django_on_sqlite(folder: str) -> str:
    """The URL of a new store in an SQLite file in a folder."""
    path = Path(folder) / "django.sqlite3"
    path.parent.mkdir(parents=True, exist_ok=True)
    alias = "s" + _name(folder)
    add_database(alias, {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)})
    if not path.exists():
        shutil.copyfile(_template(), path)
    return f"django://{alias}"


def django_on_postgres(folder: str) -> str:
    """The URL of a new store in a PostgreSQL database of its own."""
    import psycopg

    from .postgres import postgres_url

    alias = "p" + _name(folder)
    base = postgres_url()
    template = _postgres_template()
    with psycopg.connect(base, autocommit=True) as conn:
        known = conn.execute("SELECT FROM pg_database WHERE datname = %s", [alias]).fetchone()
        if known is None:
            conn.execute(f'CREATE DATABASE "{alias}" TEMPLATE "{template}"'.encode())
    add_database(alias, _postgres(alias))
    return f"django://{alias}"


def django_on_own_postgres(server: Postgres, database: str) -> str:
    """The URL of a new store on a PostgreSQL server that a test may kill."""
    server.run(f'CREATE DATABASE "{database}"')
    add_database(database, _postgres(database, server.url()))
    _migrate(database)
    return f"django://{database}"


def _postgres(database: str, url: str = "") -> dict[str, Any]:
    from .postgres import postgres_url

    parts = urllib.parse.urlsplit(url or postgres_url())
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": database,
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or 5432),
    }


def django_on_mariadb(folder: str) -> str:
    """The URL of a new store in a MariaDB database of its own.

    The driver is mysqlclient, or else PyMySQL.
    """
    from .mariadb import mariadb_url

    parts = urllib.parse.urlsplit(mariadb_url())
    alias = "m" + _name(folder)
    server = {
        "ENGINE": "django.db.backends.mysql",
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or 3306),
    }
    add_database("mariadb", {**server, "NAME": ""})
    from django.db import connections

    with connections["mariadb"].cursor() as cursor:
        cursor.execute("SHOW DATABASES")
        is_new = (alias,) not in cursor.fetchall()
        cursor.execute(f"CREATE DATABASE IF NOT EXISTS {alias}")
    add_database(alias, {**server, "NAME": alias})
    if is_new:
        _migrate(alias)
    return f"django://{alias}"


def add_database(alias: str, settings: dict[str, Any]) -> None:
    """Add a database to the project of this process and of the processes that it starts."""
    known = json.loads(os.environ.get("TIDEMILL_TEST_DATABASES", "{}"))
    known.setdefault("default", {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"})
    known[alias] = settings
    os.environ["TIDEMILL_TEST_DATABASES"] = json.dumps(known)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "servers.django_project")
    here = str(Path(__file__).parents[1])
    if here not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, before]))
    import django
    from django.db import connections

    django.setup()
    if alias not in connections.settings:
        whole = connections.configure_settings({"default": {}, alias: settings})
        connections.settings[alias] = whole[alias]


@functools.cache
def _template() -> Path:
    """An SQLite file with migrated tables."""
    path = Path(tempfile.mkdtemp(prefix="tidemill-django-")) / "template.sqlite3"
    add_database("template", {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)})
    _migrate("template")
    return path


@functools.cache
def _postgres_template() -> str:
    import psycopg

    from .postgres import postgres_url

    name = f"django_template_{os.getpid()}"
    with psycopg.connect(postgres_url(), autocommit=True) as conn:
        conn.execute(f'DROP DATABASE IF EXISTS "{name}"'.encode())
        conn.execute(f'CREATE DATABASE "{name}"'.encode())
    add_database(name, _postgres(name))
    _migrate(name)
    return name


def _migrate(alias: str) -> None:
    from django.core.management import call_command
    from django.db import connections

    call_command("migrate", database=alias, verbosity=0)
    connections[alias].close()


def _name(folder: str) -> str:
    import hashlib

    return hashlib.sha1(folder.encode()).hexdigest()[:16]
