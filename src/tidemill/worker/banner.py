"""The first output of a worker: a banner for people, or one line of the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
from collections.abc import Mapping

import msgspec

from tidemill.worker.child_protocol import Hello
from tidemill.worker.settings import Settings

log = logging.getLogger("tidemill.worker")

TASKS_MOST = 30
"""Tasks that the banner names."""


class Start(msgspec.Struct, frozen=True):
    """A worker that begins to serve. ``url`` has no password."""

    worker: str
    url: str
    settings: Settings
    hello: Hello

    def log(self, extra: Mapping[str, object] | None = None) -> None:
        """Log the start as one line."""
        log.info(
            "worker %s serves %s of %s with %d x %d",
            self.worker,
            ", ".join(self.settings.queues) or "all queues",
            self.url,
            self.settings.processes,
            self.settings.concurrency,
            extra=extra,
        )

    def log_details(self) -> None:
        """Log the start with all details of the banner as extras, for JSON."""
        settings = self.settings
        self.log(
            {
                "app": settings.app,
                "store": self.url,
                "queues": settings.queues,
                "order": str(settings.mode),
                "tasks": sorted(self.hello.names),
                "imports": self.hello.imports,
                "processes": settings.processes,
                "slots": settings.concurrency,
            }
        )

    def print(self) -> None:
        """Print the banner on stderr."""
        if sys.stderr is not None:  # a process may start without stderr
            with contextlib.suppress(OSError, ValueError):  # nobody reads stderr
                sys.stderr.write(self.banner())
                sys.stderr.flush()

    def banner(self) -> str:
        """The start as a text of several lines."""
        settings = self.settings
        lines = {
            "store": self.url,
            "queues": f"{', '.join(settings.queues) or 'all'} ({settings.mode} order)",
            "tasks": self._tasks(),
            "slots": f"{settings.processes} x {settings.concurrency} (processes x jobs at a time)",
            "stop": f"Ctrl-C finishes running jobs within {settings.shutdown_timeout:g} s; "
            "Ctrl-C twice stops now",
        }
        parts = [f"tidemill worker {self.worker} serves {settings.app}"]
        for name, text in lines.items():
            parts += textwrap.wrap(
                text,
                100,
                initial_indent=f"  {name:8}",
                subsequent_indent=" " * 10,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(parts) + "\n"

    def _tasks(self) -> str:
        names = sorted(self.hello.names)
        parts = [", ".join(names[:TASKS_MOST])] if names else []
        if len(names) > TASKS_MOST:
            parts.append(f"and {len(names) - TASKS_MOST:,} more")
        if self.hello.imports:
            parts.append(f"imported by name: {', '.join(self.hello.imports)}")
        return "; ".join(parts) or "none"
