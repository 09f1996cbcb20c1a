"""Django's database connections around each job, as Django treats them around each request.

- Before and after a job, connections that are too old (``CONN_MAX_AGE``) or unusable are closed.
- A kept connection is checked before its next query, if the last check was more than a second ago.
  So after a restart of the database, the next job opens a new connection and does not fail.
- A job that a timeout interrupted may leave a transaction open. The connections of such a job are
  closed.

Sync tasks use the connections of their own thread. Async tasks use the connections of the thread in
which ``sync_to_async`` runs. So these steps run in the thread that makes the queries of the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections, reset_queries

from tidemill.client.context import JobContext
from tidemill.client.threads import is_in_event_loop

EVERY = 1.0  # seconds after which a connection is checked again before its next query

shared_connections: dict[str, Any] = {}
"""The connections of a test, by alias. While this dict is not empty, all jobs use them."""


def fresh_connections(call_next: Callable[[], Any], context: JobContext) -> Any:
    """Middleware: prepare and close the database connections around a job of a worker."""
    if not context.token:  # the job runs in its caller, whose connections are in use
        return call_next()
    if is_in_event_loop():
        return _around_async(call_next)
    own, broken = begin(), False
    try:
        return call_next()
    except BaseException as error:
        # A timeout (a BaseException) may have interrupted the task inside a database driver.
        broken = not isinstance(error, Exception)
        raise
    finally:
        if own:
            end(broken=broken)


async def _around_async(call_next: Callable[[], Any]) -> Any:
    own = await sync_to_async(begin)()
    try:
        return await call_next()
    finally:
        if own:
            await sync_to_async(end)()


def begin() -> bool:
    """Prepare the connections of this thread for a job.

    False when the job uses the connections of a test. The job must not close these at its end,
    which may come after the end of the test.
    """
    if shared_connections:
        for alias, connection in shared_connections.items():
            connections[alias] = connection
        return False
    reset_queries()
    now = time.monotonic()
    for connection in connections.all(initialized_only=True):
        connection.close_if_unusable_or_obsolete()
        if now - getattr(connection, "tidemill_checked", 0.0) > EVERY:
            connection.tidemill_checked = now
            connection.health_check_enabled, connection.health_check_done = True, False
    return True


def end(*, broken: bool = False) -> None:
    """Close the connections of this thread that a later job must not use."""
    for connection in connections.all(initialized_only=True):
        if broken or connection.in_atomic_block:
            connection.in_atomic_block = False  # with True, Django keeps the closed connection
            connection.run_on_commit = []
            connection.close()
        else:
            connection.close_if_unusable_or_obsolete()
