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

_SUBJECTS = (jobs, messages, topics, tasks, reservations, queues, schedules, events)

ENDPOINTS: tuple[Endpoint, ...] = tuple(one for subject in _SUBJECTS for one in subject.ENDPOINTS)
