"""Private servers for tests: from the binaries on the path, on random ports of 127.0.0.1.

Each may be killed and started again on the same port and data in the middle of a test. A server
that is missing is a failure on CI (``CI=true``) and one sentence elsewhere. To run what does not
kill its server against one of your own, set ``TIDEMILL_TEST_REDIS``, ``TIDEMILL_TEST_POSTGRES`` or
``TIDEMILL_TEST_RABBITMQ`` to its URL; each test uses a prefix or a database of its own there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .base import Server, free_port, program, refuse_servers
from .django import django_on_mariadb, django_on_own_postgres, django_on_postgres, django_on_sqlite
from .network import Machine, Proxy, may_have_machines
from .postgres import PgBouncer, Postgres, postgres_for_a_while, postgres_store, postgres_url
from .rabbitmq import RabbitMQ, rabbitmq_url
from .redis import Redis, Sentinel, language, redis_url
from .served import forget_served, http_url, served, served_for_a_while

__all__ = [
    "NETWORK",
    "STORES",
    "Machine",
    "PgBouncer",
    "Postgres",
    "Proxy",
    "RabbitMQ",
    "Redis",
    "Sentinel",
    "Server",
    "django_on_mariadb",
    "django_on_own_postgres",
    "django_on_postgres",
    "django_on_sqlite",
    "forget_served",
    "free_port",
    "http_url",
    "language",
    "may_have_machines",
    "new_store",
    "postgres_for_a_while",
    "postgres_store",
    "postgres_url",
    "program",
    "rabbitmq_url",
    "redis_url",
    "refuse_servers",
    "served",
    "served_for_a_while",
    "share_servers",
]


def share_servers() -> None:
    """Start the servers that no test kills for this process and those it will start."""
    for name, url in (("REDIS", redis_url), ("POSTGRES", postgres_url), ("RABBITMQ", rabbitmq_url)):
        try:
            os.environ[f"TIDEMILL_TEST_{name}"] = url()
        except (pytest.skip.Exception, pytest.fail.Exception):
            pass  # each test that needs it says so


def _options(name: str) -> str:
    """What follows on a name to be an option of the url."""
    return "".join(f"&{option}" for option in name.split("&")[1:])


NETWORK: dict[str, Callable[[str], str]] = {
    "redis": lambda name: f"{redis_url()}?prefix={name}",
    "postgresql": postgres_store,
    "http": lambda name: f"{http_url(name.partition('&')[0])}?patience=10{_options(name)}",
}
"""Brokers over a network: the url of a store of that name on the server that tests share."""


STORES = ("memory", "lmdb", "redis", "postgresql", "http", "django")
"""Each kind of store that can be inspected."""


def new_store(kind: str, folder: Path) -> str:
    """The url of an empty store of a kind, one of ``STORES`` or ``rabbitmq``, in a folder."""
    name = "t" + os.urandom(8).hex()
    if kind == "memory":
        return "memory://"
    if kind == "rabbitmq":
        return f"{rabbitmq_url()}?prefix={name}"
    if kind == "django":
        return django_on_sqlite(str(folder))
    return f"lmdb://{folder}/store" if kind == "lmdb" else NETWORK[kind](name)
