"""The command line: find the verb, run it, and print its error.

Each family of verbs has its own file. A verb imports rich, a broker or the worker only when it
runs, so ``tidemill --help`` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from tidemill import __version__
from tidemill.core.errors import (
    BrokerUnavailable,
    InvalidOption,
    JobNotFound,
    JobPruned,
    TidemillError,
)
from tidemill.core.files import take_standard_descriptors

__all__ = ["main"]

_VERBS = {  # each verb with its module, in the order of the help
    "demo": "demo.command",
    "worker": "cli.worker",
    "server": "cli.server",
    "token": "cli.server",
    "enqueue": "cli.enqueue",
    "jobs": "cli.jobs",
    "job": "cli.jobs",
    "explain": "cli.jobs",
    "retry": "cli.job_actions",
    "cancel": "cli.job_actions",
    "delete": "cli.job_actions",
    "schedule": "cli.schedules",
    "queues": "cli.queues",
    "limit": "cli.limits",
    "pause": "cli.queues",
    "resume": "cli.queues",
    "purge": "cli.queues",
    "delete-queue": "cli.queues",
    "recall": "cli.queues",
    "info": "cli.info",
    "doctor": "cli.doctor",
    "backup": "cli.info",
    "migrate": "cli.schema",
    "move": "cli.move",
}


class _Verbs(click.Group):
    """A group that imports each verb when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"tidemill.{_VERBS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], _VERBS, 1)
            hint = f"did you mean {near[0]!r}?" if near else "see: tidemill --help"
            ctx.fail(f"no verb {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        take_standard_descriptors()
        try:
            return super().invoke(ctx)
        except TidemillError as error:
            click.echo(f"tidemill: {_sentence(error)}", err=True)
            sys.exit(_exit_code(error))


def _sentence(error: TidemillError) -> str:
    """The text of an error, with advice where the error has none."""
    if isinstance(error, JobPruned):
        return f"{error}; to keep finished jobs longer add ?keep=SECONDS to the url"
    if isinstance(error, JobNotFound):
        return f"{error}; try tidemill jobs --search TEXT, or name another store with --url"
    return str(error)


def _exit_code(error: TidemillError) -> int:
    if isinstance(error, BrokerUnavailable):
        return 3
    from tidemill.brokers.registry import DriverMissing

    return 2 if isinstance(error, (InvalidOption, DriverMissing)) else 1


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tidemill")
def main() -> None:
    """tidemill: durable background jobs, from one directory on disk up.

    New here? Run: tidemill demo

    Commands use the nearest .tidemill directory unless you pass --url or --app, or set
    $TIDEMILL_URL or $TIDEMILL_APP. With --json they print one JSON document. Exit codes: 0 done,
    1 not done, 2 wrong usage or a missing driver, 3 the broker cannot be reached.
    """
