"""The JSON API under ``/v1``, a room for each thing it is about."""

from __future__ import annotations

from tidemill.server.api import events, jobs, messages, queues, schedules
from tidemill.server.endpoints import Endpoint

__all__ = ["ENDPOINTS"]

ENDPOINTS: tuple[Endpoint, ...] = (
    *jobs.ENDPOINTS,
    *messages.ENDPOINTS,
    *queues.ENDPOINTS,
    *schedules.ENDPOINTS,
    *events.ENDPOINTS,
)
