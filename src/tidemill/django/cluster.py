"""The setting ``Q_CLUSTER`` of django-q: keys that tidemill reads, and advice on other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings

READ = frozenset(
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
    "catch_up": "give catch_up= to a schedule",
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
    """The setting ``Q_CLUSTER``; empty without one."""
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
