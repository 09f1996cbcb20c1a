"""Read the setting ``TIDEMILL``. The ``OPTIONS`` of a task backend have the same keys.

TIDEMILL = {
    "URL": "redis://localhost/0",       # where the jobs live
    "TEST_URL": "memory://",            # where they live while tests run
    "ENQUEUE_ON_COMMIT": True,          # or the alias of a database, or False
    "ROBUST": False,                    # True: after a commit, log the puts that fail
    "JOIN_ATOMIC": "default",           # PostgreSQL: store the jobs in this database's atomic
    "RETRIES": 3,                       # each option of a task, in capitals
}

The setting ``Q_CLUSTER`` of django-q is read too, below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from django.conf import ENVIRONMENT_VARIABLE, settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from tidemill.client.options import TASK_OPTIONS
from tidemill.core.config import parse_url
from tidemill.core.suggest import hint
from tidemill.errors import TidemillError

KEYS = (
    *("URL", "TEST_URL", "ENQUEUE_ON_COMMIT", "ROBUST", "JOIN_ATOMIC", "MIDDLEWARE"),
    *("SECRET_KEYS", "SERIALIZER", "ALLOW_IMPORTS", "SYNC"),
)
"""The keys of ``TIDEMILL`` besides the options of tasks."""

_PLAIN = {"SECRET_KEYS": (), "SERIALIZER": "msgpack", "ALLOW_IMPORTS": (), "SYNC": False}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one app.

    Attributes:
        url: the URL of the store.
        test_url: the URL of the store while Django's test environment is set up.
        on_commit: the alias of the database for whose commit a put waits; empty for no wait. A put
            does not wait if the store is in this database.
        robust: True logs the error of a put that waited for the commit; False raises the error.
        join: the alias of the database whose transaction stores the jobs; empty for none.
        app: arguments of :class:`tidemill.Tidemill` besides the options of tasks.
        tasks: the default options of tasks.
        middleware: dotted paths.
    """

    url: str | None
    test_url: str
    on_commit: str = "default"
    robust: bool = False
    join: str = ""
    app: dict[str, Any] = {}
    tasks: dict[str, Any] = {}
    middleware: tuple[str, ...] = ()

    def layers(self) -> list[Any]:
        """The middleware of the project; ImproperlyConfigured for a path without one."""
        try:
            return [import_string(path) for path in self.middleware]
        except ImportError as error:
            raise ImproperlyConfigured(f"TIDEMILL['MIDDLEWARE']: {error}") from error


def _refuse_half_of_the_settings() -> None:
    """Refuse an import of tasks in the settings module above ``TIDEMILL``."""
    name = os.environ.get(ENVIRONMENT_VARIABLE, "")
    module = sys.modules.get(name)
    is_loading = getattr(getattr(module, "__spec__", None), "_initializing", False)
    if is_loading and not hasattr(module, "TIDEMILL"):
        raise ImproperlyConfigured(
            f"the settings module {name} imports tasks before it sets TIDEMILL, so TIDEMILL would "
            "have no effect; import them below TIDEMILL, or give dotted paths instead"
        )


def read_settings(given: Mapping[str, Any] | None = None, where: str = "TIDEMILL") -> Settings:
    """The settings in ``given``, or in the setting ``TIDEMILL``.

    Raises:
        ImproperlyConfigured: a key is unknown, or a value cannot be used.
    """
    if given is None:
        _refuse_half_of_the_settings()
        given = getattr(settings, "TIDEMILL", {})
    if not isinstance(given, Mapping):
        raise ImproperlyConfigured(f"{where} must be a dict, not {type(given).__name__}")
    options = tuple(name.upper() for name in TASK_OPTIONS)
    for key in given:
        if key not in (*KEYS, *options):
            near = hint(str(key), (*KEYS, *options))
            raise ImproperlyConfigured(f"{where} has no key {key!r}; {near}")
    url = given.get("URL") or os.environ.get("TIDEMILL_URL") or store_url() or _default_url()
    return Settings(
        url=url,
        test_url=given.get("TEST_URL") or "memory://",
        on_commit=_on_commit(given.get("ENQUEUE_ON_COMMIT", True), where),
        robust=_boolean(given.get("ROBUST", False), "ROBUST", where),
        join=_alias(given.get("JOIN_ATOMIC") or "", "JOIN_ATOMIC", where),
        app={key.lower(): given.get(key, value) for key, value in _PLAIN.items()},
        tasks={key.lower(): value for key, value in given.items() if key in options},
        middleware=tuple(given.get("MIDDLEWARE", ())),
    )


def _default_url() -> str | None:
    """``.tidemill`` in the project's ``BASE_DIR``; None for the default URL of tidemill."""
    base = getattr(settings, "BASE_DIR", None)
    return f"lmdb://{base}/.tidemill" if base else None


def _on_commit(value: Any, where: str) -> str:
    return "default" if value is True else _alias(value or "", "ENQUEUE_ON_COMMIT", where)


def _boolean(value: Any, key: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise ImproperlyConfigured(f"{where}[{key!r}] must be True or False, not {value!r}")
    return value


def database_of(url: str | None) -> str:
    """The alias in a URL ``django://alias``; empty for another URL."""
    if not url or not url.startswith("django:"):
        return ""
    try:
        return parse_url(url).path.strip("/") or "default"
    except TidemillError:
        return ""


def _alias(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise ImproperlyConfigured(
            f"{where}[{key!r}] must be the alias of a database, not {value!r}"
        )
    if value and value not in settings.DATABASES:
        near = hint(value, settings.DATABASES)
        raise ImproperlyConfigured(f"{where}[{key!r}] names no database {value!r}; {near}")
    return value


CLUSTER_KEYS = frozenset(
    {
        *("name", "workers", "recycle", "max_rss", "timeout", "max_attempts", "ack_failures"),
        *("sync", "save_limit", "redis", "orm", "log_level", "retry", "time_zone"),
    }
)
"""The keys that tidemill reads, or that tidemill does not need."""

WITHOUT_MEANING = {
    "bulk": "a worker fetches by the measured length of its jobs",
    "queue_limit": "mill.queue(name, max_size=…) bounds a queue",
    "poll": "a put wakes a worker",
    "guard_cycle": "a worker learns at once that a process died",
    "compress": "bodies are not compressed",
    "catch_up": "a schedule has one job for all missed times; mill.schedule(…, catch_up=True) has "
    "one for each",
    "scheduler": "each worker fires schedules, each time once",
    "cpu_affinity": "use taskset, or CPUAffinity= of systemd",
    "daemonize_workers": "tasks may start processes",
    "error_reporter": "the log has each failure; Sentry and the like read the log",
    "save_limit_per": "give result_ttl= to a task",
    "label": "the admin calls the application Tidemill",
    "django_redis": "name the server in TIDEMILL['URL']",
    "sqs": "there is no broker for SQS; name a store in TIDEMILL['URL']",
    "iron_mq": "there is no broker for IronMQ; name a store in TIDEMILL['URL']",
    "mongo": "there is no broker for MongoDB; name a store in TIDEMILL['URL']",
    "disque_nodes": "there is no broker for Disque; name a store in TIDEMILL['URL']",
    "broker_class": "name a store in TIDEMILL['URL']",
    "cached": "results are in the store",
    "cache": "results are in the store",
    "ALT_CLUSTERS": "cluster= names a queue; run a worker with -Q for it",
}
"""The other keys, each with advice on a replacement."""


def cluster() -> Mapping[str, Any]:
    given = getattr(settings, "Q_CLUSTER", None)
    return given if isinstance(given, Mapping) else {}


def uses_django_q() -> bool:
    """True when the project has the setting ``Q_CLUSTER``. Then jobs may name any function."""
    return isinstance(getattr(settings, "Q_CLUSTER", None), Mapping)


def store_url() -> str | None:
    """The URL of the store that ``Q_CLUSTER`` names: ``orm`` or ``redis``."""
    given = cluster()
    if alias := given.get("orm"):
        return f"django://{alias}"
    redis = given.get("redis")
    if isinstance(redis, str):
        return redis
    if isinstance(redis, Mapping):
        user = f":{redis['password']}@" if redis.get("password") else ""
        host, port = redis.get("host", "localhost"), redis.get("port", 6379)
        return f"redis://{user}{host}:{port}/{redis.get('db', 0)}"
    return None


def task_defaults() -> dict[str, Any]:
    """The options of each call: ``timeout``, and ``retries`` by ``max_attempts``.

    Without ``max_attempts`` a failed task is not tried again. ``retry`` is ignored: no second
    worker gets a job that still runs.
    """
    given = cluster()
    options: dict[str, Any] = {"retries": 0}
    if given.get("timeout"):
        options["timeout"] = given["timeout"]
    if given.get("max_attempts") and not given.get("ack_failures"):
        options["retries"] = int(given["max_attempts"]) - 1
    if given.get("save_limit") == -1:
        options["result_ttl"] = 0
    return options


def worker_options() -> dict[str, str]:
    """The options of ``manage.py tidemill worker`` that ``Q_CLUSTER`` gives."""
    given = cluster()
    found: dict[str, Any] = {"-p": given.get("workers"), "--max-jobs": given.get("recycle")}
    if given.get("max_rss"):
        found["--max-memory"] = max(1, int(given["max_rss"]) // 1024)  # kilobytes to megabytes
    if given.get("workers"):
        found["-c"] = 1  # a worker of django-q runs one task at a time
    return {name: str(value) for name, value in found.items() if value}
