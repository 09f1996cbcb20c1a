"""The log of the tasks that a worker does not know."""

from __future__ import annotations

from tidemill.core.job import Lease
from tidemill.worker.child_protocol import Hello
from tidemill.worker.safe_logging import SafeLog

log = SafeLog("tidemill.worker")

_LOGGED_MOST = 1000
"""The most task names that a worker logs."""


class UnknownTasks:
    """The unknown tasks that a worker has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, lease: Lease, error: str, hello: Hello | None) -> None:
        """Log the unknown task of a job, once. ``hello`` is of a process that has the app."""
        task = lease.open().task
        if task in self._logged or len(self._logged) >= _LOGGED_MOST:
            return
        self._logged.add(task)
        log.warning(
            "%s: this app has %d task(s), and none of that name; does the app import the module "
            "that declares it? Its jobs are tried again every 30 s at most until a worker knows it",
            error,
            len(hello.names) if hello is not None else 0,
        )
