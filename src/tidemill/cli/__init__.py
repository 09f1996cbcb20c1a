"""The command line. One file a family of verbs; this one finds them and words their errors.

What a verb needs (rich, a broker, the worker) it imports when it runs, so that ``tidemill --help``
answers at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from tidemill import __version__
from tidemill.errors import (
    BrokerUnavailable,
    InvalidOption,
    JobNotFound,
    JobPruned,
    TidemillError,
)
from tidemill.files import take_standard_descriptors

__all__ = ["main"]

_VERBS = {  # verb: the file here that has it, in the order the help lists them
    "demo": "demo",
    "worker": "worker",
    "server": "server",
    "token": "server",
    "enqueue": "enqueue",
    "jobs": "jobs",
    "job": "jobs",
    "explain": "jobs",
    "retry": "act",
    "cancel": "act",
    "delete": "act",
    "schedule": "schedule",
    "queues": "queues",
    "limit": "limits",
    "pause": "queues",
    "resume": "queues",
    "purge": "queues",
    "delete-queue": "queues",
    "recall": "queues",
    "info": "info",
    "doctor": "doctor",
    "backup": "info",
    "migrate": "migrate",
    "move": "move",
}


class _Verbs(click.Group):
    """The verbs, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"tidemill.cli.{_VERBS[cmd_name]}")
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
    """What went wrong, and what to do where the error does not say it itself."""
    if isinstance(error, JobPruned):
        return f"{error}; to keep finished jobs longer add ?keep=SECONDS to the url"
    if isinstance(error, JobNotFound):
        return f"{error}; try tidemill jobs --search TEXT, or name another store with --url"
    return str(error)


def _exit_code(error: TidemillError) -> int:
    if isinstance(error, BrokerUnavailable):
        return 3
    from tidemill.brokers.schemes import DriverMissing

    return 2 if isinstance(error, (InvalidOption, DriverMissing)) else 1


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tidemill")
def main() -> None:
    """tidemill: durable background jobs, from one directory on disk up.

    New here? Run: tidemill demo

    Verbs find their jobs by --url or --app, else by $TIDEMILL_URL or $TIDEMILL_APP, else in
    .tidemill beside the nearest pyproject.toml or .git. With --json they print one JSON document.
    Exit codes: 0 done, 1 it could not be done, 2 wrong usage or a missing driver, 3 the broker
    cannot be reached.
    """
