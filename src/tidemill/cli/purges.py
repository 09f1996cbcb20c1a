"""``tidemill purge``, ``purges`` and ``restore``."""

from __future__ import annotations

import sys
from datetime import datetime

import click

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.generic import purges as kept
from tidemill.cli.connect import json_option, store_options
from tidemill.client.queues import no_such_queue


@click.command()
@click.argument("queue")
@click.option("--now", is_flag=True, help="Delete the jobs for good; keep nothing to restore.")
@click.option("--yes", is_flag=True, help="Purge without asking for the queue's name.")
@json_option
@store_options
def purge(mill: Tidemill, queue: str, now: bool, yes: bool, as_json: bool) -> None:
    """Delete all jobs of a queue that are neither running nor finished.

    The jobs are kept for a while, so that `tidemill restore` can bring them back.
    """
    rows = {row.name: row for row in mill.queues()}
    if queue not in rows:
        raise no_such_queue(queue, rows)
    count = rows[queue].size - rows[queue].running
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"this deletes {count:,} jobs; to go on add --yes")
        how = "" if Feature.INSPECT in mill.broker.features and not now else " for good"
        question = f"this deletes {count:,} jobs{how}; type the queue's name to go on"
        if click.prompt(question, default="", show_default=False, err=True) != queue:
            click.echo("tidemill: that is not the queue's name; nothing was deleted", err=True)
            sys.exit(1)
    purged = kept.purge(mill.broker, queue, now=now)
    if as_json:
        from tidemill.cli.console import print_json

        facts = {"queue": queue, "deleted": purged.jobs, "kept": purged.kept}
        print_json(facts | {"purge": purged.id or None})
    else:
        click.echo(f"deleted {_jobs(purged.jobs)} of {queue}{_way_back(queue, purged)}")


def _way_back(queue: str, purged: kept.Purged) -> str:
    if not purged.kept:
        return ""
    which = "them" if purged.kept == purged.jobs else f"{purged.kept:,} of them"
    return f"; to bring {which} back: tidemill restore {queue}"


@click.command()
@click.argument("queue")
@json_option
@store_options
def purges(mill: Tidemill, queue: str, as_json: bool) -> None:
    """List the purges of a queue that can be restored, the latest first."""
    from tidemill.cli import console

    found = kept.list_purges(mill.broker, queue)
    if as_json:
        rows = [{"id": one.id, "at": one.at, "jobs": one.jobs} for one in found]
        console.print_json({"queue": queue, "purges": rows})
    elif not found:
        click.echo(f"no purge of {queue} can be restored")
    else:
        out = console.console()
        cells = [(one.id, _moment(one.at), f"{one.jobs:,}" if one.jobs else "?") for one in found]
        out.print(console.table(out, ("purge", "time", "jobs#"), cells))


@click.command()
@click.argument("queue")
@click.argument("purge", default="")
@json_option
@store_options
def restore(mill: Tidemill, queue: str, purge: str, as_json: bool) -> None:
    """Bring back the jobs of the latest purge, or of the given one.

    A job stays purged when another job has its key by now; the same command may bring it back
    later. A job that has expired, or belongs to a flow, stays purged for good.
    """
    restored = kept.restore(mill.broker, queue, purge)
    if as_json:
        from tidemill.cli.console import print_json

        print_json({"queue": queue, "restored": restored.jobs, "left": restored.left})
        return
    left = f"; {_jobs(restored.left)} stay purged" if restored.left else ""
    click.echo(f"restored {_jobs(restored.jobs)} of {queue}{left}")


def _jobs(count: int) -> str:
    return f"{count:,} job{'' if count == 1 else 's'}"


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
