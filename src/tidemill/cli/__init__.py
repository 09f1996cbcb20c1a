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
from tidemill.core.files import take_standard_descriptors
from tidemill.core.suggest import did_you_mean
from tidemill.errors import (
    BrokerUnavailable,
    InvalidOption,
    JobNotFound,
    JobPruned,
    TidemillError,
)

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
    "alter": "cli.job_actions",
    "delete": "cli.job_actions",
    "schedule": "cli.schedules",
    "queues": "cli.queues",
    "limit": "cli.limits",
    "bind": "cli.topics",
    "unbind": "cli.topics",
    "publish": "cli.topics",
    "pause": "cli.queues",
    "resume": "cli.queues",
    "purge": "cli.queues",
    "purges": "cli.queues",
    "restore": "cli.queues",
    "delete-queue": "cli.queues",
    "top": "cli.top.command",
    "workers": "cli.workers",
    "profile": "cli.workers",
    "alerts": "cli.alerts",
    "info": "cli.info",
    "doctor": "cli.doctor",
    "backup": "cli.info",
    "migrate": "cli.schema",
    "move": "cli.move",
}


class _Verbs(click.Group):
    """A click group that imports the module of a verb when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"tidemill.{_VERBS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._behind_the_verb(ctx, args))

    def _behind_the_verb(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move options from before the verb to behind the verb: ``tidemill --url URL jobs``."""
        at = 0
        while at < len(args) and args[at].partition("=")[0] in ("--url", "--app"):
            at += 1 if "=" in args[at] else 2
        store, rest = args[:at], args[at:]
        if store and not rest:
            ctx.fail("a verb is missing, such as: tidemill jobs --url URL")
        if not store:
            return args
        verb = (
            1
            if rest[0] not in _VERBS
            else 1 + isinstance(self.get_command(ctx, rest[0]), click.Group)
        )
        return [*rest[:verb], *store, *rest[verb:]]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _VERBS and not args[0].startswith("-"):
            near = did_you_mean(args[0], _VERBS)
            ctx.fail(f"no verb {args[0]!r}; {near or 'see: tidemill --help'}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        take_standard_descriptors()
        try:
            return super().invoke(ctx)
        except TidemillError as error:
            click.echo(f"tidemill: {_sentence(error)}", err=True)
            sys.exit(_exit_code(error))


def _sentence(error: TidemillError) -> str:
    """The text of an error; some errors without advice get advice here."""
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
