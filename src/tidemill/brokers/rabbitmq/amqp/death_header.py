"""The ``x-death`` header: why the server took a message out of a queue, and out of which queue.

The server writes this header when it dead-letters a message. The latest entry comes first.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

OURS = ("error", "queue", "place")
"""Headers that tidemill adds to a message when it moves the message to the failed jobs."""

_CAUSES = {
    "delivery_limit": "the delivery-limit of a policy was reached",
    "expired": "the message-ttl of a policy was over",
    "maxlen": "a policy limits the length of the queue",
    "rejected": "another program rejected it",
}

_TRACES = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")


class Death(msgspec.Struct, frozen=True):
    """One dead-lettering.

    Attributes:
        place: the queue of the server that had the message.
        why: one sentence for people.
        time: wall time.
    """

    place: str
    why: str
    time: float


def death_of(headers: Mapping[str, Any]) -> Death | None:
    """The latest dead-lettering of a failed message; None if tidemill itself moved the message."""
    deaths = headers.get("x-death")
    if "queue" in headers or not isinstance(deaths, list) or not deaths:
        return None
    last = deaths[0] if isinstance(deaths[0], dict) else {}
    place, reason, when = (last.get(name) for name in ("queue", "reason", "time"))
    cause = _CAUSES.get(str(reason), str(reason))
    moment = when.replace(tzinfo=UTC).timestamp() if isinstance(when, datetime) else 0.0
    return Death(str(place or ""), f"rabbitmq took it out of {place}: {cause}", moment)


def without_traces(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers that the message had when it was first published."""
    return {
        name: value
        for name, value in headers.items()
        if name not in OURS and not name.startswith(_TRACES)
    }
