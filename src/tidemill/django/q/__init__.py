"""The functions of django-q, on tidemill: change the imports of ``django_q.tasks`` to this module.

    from tidemill.django.q import async_task, result

The names, arguments and units (milliseconds for ``wait``) are those of django-q.
:mod:`tidemill.django.settings` reads the setting ``Q_CLUSTER``. The guide
``docs/how-to/from-django-q.md`` names the differences.
"""

from tidemill.django.q.calls import (
    AsyncTask,
    Chain,
    Iter,
    async_chain,
    async_iter,
    async_task,
    delete_group,
)
from tidemill.django.q.results import (
    Task,
    count_group,
    delete_cached,
    fetch,
    fetch_group,
    queue_size,
    result,
    result_group,
)
from tidemill.django.q.schedules import Schedule, schedule, validate_cron

__all__ = [
    "AsyncTask",
    "Chain",
    "Iter",
    "Schedule",
    "Task",
    "async_chain",
    "async_iter",
    "async_task",
    "count_group",
    "delete_cached",
    "delete_group",
    "fetch",
    "fetch_group",
    "queue_size",
    "result",
    "result_group",
    "schedule",
    "validate_cron",
]
