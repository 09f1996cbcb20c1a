"""The facts that ``tidemill info`` shows of a RabbitMQ server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.brokers.rabbitmq.amqp.short_connection import short_connection
from tidemill.brokers.rabbitmq.layout import Names
from tidemill.brokers.rabbitmq.settings import Settings
from tidemill.brokers.rabbitmq.timer_queues import TimerQueues


def describe(
    settings: Settings, names: Names, server: Mapping[str, str], blocked: str
) -> dict[str, Any]:
    """Describe a server. ``server`` has the properties that the server reports."""
    version = server.get("version", "")
    with short_connection(settings) as there:
        delayed = sum(there.count(place)[0] for place in TimerQueues(names).all())
        failed, _ = there.count(names.failed)
    return {
        "broker": "rabbitmq",
        "url": settings.shown,
        "server": f"{server.get('product', 'unknown')} {version}".strip(),
        "cluster": server.get("cluster_name", ""),
        "queues": "classic" if settings.classic else "quorum",
        "prefix": settings.prefix,
        "durable": True,
        "durability": "accepted jobs survive power loss: only what is synced is confirmed",
        "delayed": delayed,
        "failed": failed,
        "publishing": f"blocked: {blocked}" if blocked else "open",
    }
