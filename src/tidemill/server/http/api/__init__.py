"""The endpoints of the JSON API under ``/v1``, in one file for each subject."""

from __future__ import annotations

from tidemill.server.http.api import (
    events,
    jobs,
    messages,
    queues,
    reservations,
    schedules,
    tasks,
    topics,
)
from tidemill.server.http.endpoints import Endpoint

__all__ = ["ENDPOINTS"]

ENDPOINTS: tuple[Endpoint, ...] = (
    *jobs.ENDPOINTS,
    *messages.ENDPOINTS,
    *topics.ENDPOINTS,
    *tasks.ENDPOINTS,
    *reservations.ENDPOINTS,
    *queues.ENDPOINTS,
    *schedules.ENDPOINTS,
    *events.ENDPOINTS,
)
