"""System checks of the setting ``TIDEMILL``: they open no store and no connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import django
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from tidemill.django.settings import (
    CLUSTER_KEYS,
    WITHOUT_MEANING,
    Settings,
    cluster,
    database_of,
    read_settings,
)
from tidemill.errors import TidemillError


def check_settings(
    app_configs: Sequence[Any] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    return [*_of_django(), *problems(None, "TIDEMILL"), *_of_cluster()]


def _of_django() -> Iterator[checks.CheckMessage]:
    if django.VERSION < (5, 2):
        text = f"tidemill needs Django 5.2 or later, and this is Django {django.__version__}"
        yield checks.Warning(text, id="tidemill.W005")


def _of_cluster() -> list[checks.CheckMessage]:
    """Warnings about keys of ``Q_CLUSTER`` that tidemill ignores; none if django-q is installed."""
    if "django_q" in settings.INSTALLED_APPS:
        return []
    return [
        checks.Warning(
            f"Q_CLUSTER[{key!r}] has no meaning here",
            hint=f"{WITHOUT_MEANING.get(key, 'tidemill does not know this key')}.",
            id="tidemill.W002",
        )
        for key, value in cluster().items()
        if key not in CLUSTER_KEYS and (key, value) != ("catch_up", False)
    ]


def problems(given: Any, where: str) -> list[checks.CheckMessage]:
    from tidemill.django.project import DjangoMill

    try:
        read = read_settings(given, where)
        if missing := _no_database(read, where):
            return missing
        DjangoMill(read)  # opens nothing
    except (ImproperlyConfigured, TidemillError) as error:
        return [checks.Error(f"{where}: {error}", id="tidemill.E001")]
    return [*_of_store(read, where), *_of_join(read, where)]


def app_missing(alias: str, url: str | None) -> list[checks.CheckMessage]:
    """A warning when ``TASKS`` names the backend, and the project has not installed the app."""
    # A site with a store outside of its database may only put jobs: then there is no warning.
    if apps.is_installed("tidemill.django") or (url and not database_of(url)):
        return []
    return [
        checks.Warning(
            f"TASKS[{alias!r}] is a backend of tidemill, whose app is not installed",
            hint="Add 'tidemill.django' to INSTALLED_APPS: it has the command manage.py tidemill, "
            "the admin, and the tables of django://.",
            id="tidemill.W003",
        )
    ]


def _no_database(read: Settings, where: str) -> list[checks.CheckMessage]:
    alias = database_of(read.url)
    if not alias or alias in settings.DATABASES:
        return []
    known = ", ".join(settings.DATABASES)
    text = f"{where}['URL'] names the database {alias!r}; DATABASES has {known}"
    return [checks.Error(text, id="tidemill.E002")]


def _of_store(read: Settings, where: str) -> Iterator[checks.CheckMessage]:
    if read.url and read.url.startswith("memory:") and not read.app["sync"]:
        yield checks.Warning(
            f"{where}['URL'] is memory://, which no worker in another process sees",
            hint="Name a store that processes share, such as lmdb:// with a folder.",
            id="tidemill.W001",
        )
    alias = database_of(read.url)
    database = settings.DATABASES.get(alias, {})
    mode = str(database.get("OPTIONS", {}).get("transaction_mode") or "").upper()
    is_sqlite = bool(database) and connections[alias].vendor == "sqlite"
    if is_sqlite and mode not in ("IMMEDIATE", "EXCLUSIVE"):
        yield checks.Warning(
            f"{where}['URL'] keeps the jobs in the SQLite database {alias!r}, in which a put "
            "inside atomic fails when another process writes after the block's first read",
            hint=f"Add 'transaction_mode': 'IMMEDIATE' to DATABASES[{alias!r}]['OPTIONS'].",
            id="tidemill.W004",
        )


def _of_join(read: Settings, where: str) -> Iterator[checks.CheckMessage]:
    if not read.join:
        return
    database, url = settings.DATABASES[read.join], urlsplit(read.url or "")
    name, engine = unquote(url.path.strip("/")), database.get("ENGINE", "")
    if url.scheme not in ("postgres", "postgresql"):
        yield checks.Error(
            f"{where}['JOIN_ATOMIC'] needs a store in PostgreSQL: a URL postgresql://…",
            hint="Leave JOIN_ATOMIC out: puts then wait for the commit. "
            "django:// joins atomic on each database.",
            id="tidemill.E003",
        )
    elif "postgresql" not in engine and "postgis" not in engine:
        text = f"{where}['JOIN_ATOMIC'] names {read.join!r}, which is no PostgreSQL database"
        yield checks.Error(text, id="tidemill.E004")
    elif name and name != database.get("NAME"):
        yield checks.Error(
            f"{where}['JOIN_ATOMIC'] joins the database {database.get('NAME')!r}, and the URL "
            f"names the database {name!r}; both must be the same",
            id="tidemill.E005",
        )


checks.register(check_settings, "tidemill")
