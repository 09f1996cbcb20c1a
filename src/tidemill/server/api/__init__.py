"""The JSON API under ``/v1``, a room for each thing it is about."""

from __future__ import annotations

from tidemill.server.api import (
    events,
    jobs,
    matching,
    messages,
    queues,
    reservations,
    schedules,
    tasks,
)
from tidemill.server.endpoints import Endpoint

__all__ = ["ENDPOINTS"]

ENDPOINTS: tuple[Endpoint, ...] = (
    *jobs.ENDPOINTS,
    *matching.ENDPOINTS,
    *messages.ENDPOINTS,
    *tasks.ENDPOINTS,
    *reservations.ENDPOINTS,
    *queues.ENDPOINTS,
    *schedules.ENDPOINTS,
    *events.ENDPOINTS,
)
