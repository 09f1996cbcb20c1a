"""The part of the app that finds the task of a job whose task is not declared."""

from __future__ import annotations

import fnmatch

from tidemill.client.runtime import DeclaredTask, Runtime
from tidemill.client.task import NoSuchTask, import_task, make_task


class FoundTasks:
    """The methods of :class:`tidemill.Tidemill` that find tasks by a dotted path."""

    def may_import(self: Runtime, path: str) -> bool:
        """True when ``allow_imports`` allows jobs that name this dotted path."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.allow_imports)

    def find_task(self: Runtime, name: str) -> DeclaredTask | None:
        """The task that an import finds under a dotted path; None when there is none.

        Raises:
            Exception: the module of the task cannot be imported.
        """
        if not self.may_import(name):
            return None
        try:
            function = import_task(name)
        except NoSuchTask:
            return None
        return make_task(self, function, name, self.defaults)
