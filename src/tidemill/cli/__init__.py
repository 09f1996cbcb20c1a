"""The command line: find the verb, run it, and print its error.

Each family of verbs has its own file, which is imported when one of the verbs is used. A verb
imports rich, a broker or the worker only when it runs. So ``tidemill --help`` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from tidemill import __version__
from tidemill.core.files import take_standard_descriptors
from tidemill.core.suggest import did_you_mean
from tidemill.errors import BrokerUnavailable, InvalidOption, JobNotFound, JobPruned, TidemillError

__all__ = ["main"]

_VERBS = {  # the module of each verb, and the first sentence of its help
    "demo": ("demo.command", "Measure every file of DIR, one job per file."),
    "worker": ("cli.worker", "Run the jobs of APP (module:variable or a path to a .py file)."),
    "server": ("cli.server", "Serve an app or a store over HTTP, and its dashboard."),
    "token": ("cli.server", "Manage the tokens for tidemill server --auth FILE."),
    "enqueue": ("cli.enqueue", "Enqueue a call of TASK."),
    "jobs": ("cli.jobs", "List jobs, newest first."),
    "job": ("cli.jobs", "Show one job: its settings, its events in order, its result."),
    "explain": ("cli.jobs", "Explain in one sentence why a job is in its state."),
    "retry": ("cli.job_actions", "Retry jobs: start a new run of each, with all its attempts."),
    "cancel": ("cli.job_actions", "Cancel jobs that have not finished."),
    "alter": ("cli.job_actions", "Give jobs that wait another priority or another queue."),
    "delete": ("cli.job_actions", "Delete jobs in any state, with their results."),
    "schedule": ("cli.schedules", "List, add and change schedules."),
    "queues": ("cli.queues", "List queues with their numbers of jobs."),
    "limit": ("cli.limits", "List limits, or change the limit NAME."),
    "bind": ("cli.topics", "Bind QUEUE to topics."),
    "unbind": ("cli.topics", "Delete the binding of QUEUE to PATTERN."),
    "publish": ("cli.topics", "Put a copy of BODY into each queue that is bound to TOPIC."),
    "pause": ("cli.queues", "Pause queues: no job starts."),
    "resume": ("cli.queues", "Resume paused queues: their jobs start again."),
    "purge": ("cli.queues", "Delete jobs of a queue that are neither running nor finished."),
    "purges": ("cli.queues", "List the purges of a queue that can be restored."),
    "restore": ("cli.queues", "Bring back the jobs of the latest purge, or of the given one."),
    "delete-queue": ("cli.queues", "Delete a queue with its counters, settings and bindings."),
    "top": ("cli.top.command", "Show queues, rates, running jobs and workers as they change."),
    "workers": ("cli.workers", "List the workers of a store, or show what a worker is doing."),
    "profile": ("cli.workers", "For some seconds, sample what the jobs of a worker do."),
    "alerts": ("cli.alerts", "Watch a store by rules, and tell a webhook or a command."),
    "info": ("cli.info", "Show the store, its queues, its workers and its latest runs."),
    "doctor": ("cli.doctor", "Check the store, its disk, its clocks and its workers."),
    "backup": ("cli.info", "Copy the store to DIR while it is in use."),
    "migrate": ("cli.info", "Make the tables of a store, or update them to this version."),
    "move": ("cli.move", "Move all jobs of the store FROM into the store TO."),
}


class _Verbs(click.Group):
    """A click group that imports the module of a verb when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"tidemill.{_VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, sentence) for verb, (_, sentence) in _VERBS.items()])

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
