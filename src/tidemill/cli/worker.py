"""``tidemill worker``: run the jobs of an app."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import click

from tidemill.brokers.contract.exchange import Mode
from tidemill.core.config import check_name

__all__ = ["worker"]


@click.command()
@click.argument("app")
@click.option(
    "-p",
    "--processes",
    type=click.IntRange(1, 512),
    default=max(1, (os.cpu_count() or 1)),
    show_default="one per core",
    help="The number of worker processes.",
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1, 10_000),
    default=8,
    show_default=True,
    help="Jobs at a time in each process; 1 runs them in the main thread.",
)
@click.option(
    "-Q",
    "--queues",
    help="Serve only these queues, comma-separated, and empty the first before the second.",
)
@click.option(
    "--order",
    type=click.Choice([str(m) for m in Mode]),
    default=None,
    help="Serve several queues strict (default with -Q), fair (default without), merged.",
)
@click.option("--burst", is_flag=True, help="End when no job is ready any more.")
@click.option(
    "--stuck-grace",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds for the other jobs of a process with a stuck job; an hour if it has no retry.",
)
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds for running jobs after the first TERM or INT.",
)
@click.option(
    "--unknown-grace",
    type=click.FloatRange(0),
    default=None,
    envvar="TIDEMILL_UNKNOWN_GRACE",
    metavar="SECONDS",
    help="Fail jobs whose task no worker has known for this long; without it they are kept.",
)
@click.option(
    "--max-jobs",
    type=click.IntRange(0),
    default=0,
    help="Replace a process after this many jobs; 0 for never.",
)
@click.option(
    "--max-memory",
    type=click.IntRange(0),
    default=0,
    metavar="MB",
    help="Replace a process that uses more megabytes; 0 for never.",
)
@click.option("--name", default="", help="The name of this worker in trails; default host:pid.")
@click.option(
    "--reload", is_flag=True, help="For development: reload when a .py file below here changes."
)
@click.option(
    "--ends-with", type=int, default=0, hidden=True, help="End together with this process."
)
@click.option("-v", "--verbose", count=True, help="Log the worker's steps in detail.")
def worker(
    ends_with: int,
    queues: str | None,
    order: str | None,
    max_memory: int,
    reload: bool,
    verbose: int,
    **settings: Any,
) -> None:
    """Run the jobs of APP, which is module:variable or a path to a .py file.

    Signals: TERM or INT finishes the running jobs and ends; a second one, at least 0.2 s later,
    ends at once. HUP reloads the app. QUIT ends at once. USR1 prints all stacks. Exit codes:
    0 clean, 1 jobs were interrupted, 2 wrong usage or import error, 3 broker unreachable.
    """
    from tidemill.worker.supervisor import Settings, Supervisor, install

    level = "DEBUG" if verbose else os.environ.get("TIDEMILL_LOG", "INFO")
    os.environ["TIDEMILL_LOG"] = level  # for the processes
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"
    )
    names = _names(queues)
    mode = Mode(order) if order else Mode.STRICT if names else Mode.FAIR
    if ends_with:
        from tidemill.core.parent_exit import end_with

        end_with(ends_with)
    supervisor = Supervisor(
        Settings(queues=names, mode=mode, max_memory=max_memory << 20, **settings)
    )
    install(supervisor)
    if reload:
        from tidemill.cli.reload import watch

        watch(os.getcwd())
    sys.exit(supervisor.run())


def _names(queues: str | None) -> tuple[str, ...]:
    """The queues of ``-Q``, in order."""
    if queues is None:
        return ()
    names = [part.strip() for part in queues.split(",")]
    if "" in names:
        what = "no queue" if not any(names) else "an empty name among the queues"
        raise click.UsageError(f"-Q {queues!r} has {what}; write it as -Q urgent,normal")
    return tuple(check_name("queue", name) for name in dict.fromkeys(names))
