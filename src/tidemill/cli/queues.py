"""``tidemill queues``, ``pause``, ``resume``, ``purge``, ``delete-queue`` and ``recall``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from tidemill.app import Tidemill
from tidemill.brokers.carrier.broker import CarryingBroker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.cli.connect import json_option, store_options
from tidemill.cli.limits import state_of
from tidemill.core.config import check_name
from tidemill.core.errors import TidemillError
from tidemill.limits.arithmetic import LimitStats
from tidemill.limits.declare import terms_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["delete_queue", "pause", "purge", "queues", "queues_table", "recall", "resume"]


def queues_table(mill: Tidemill, out: Console, rows: list[QueueStats]) -> Table:
    """A table of queues. ``oldest`` is the age of the oldest ready job."""
    has = Feature.LIMITS in mill.broker.features
    limits = {row.name: row for row in mill.limits.list() if row.queue} if has else {}
    from tidemill.cli import console

    columns = (
        *("queue", "ready#", "running#", "scheduled#?", "waiting#?", "oldest#?"),
        *("succeeded#?", "failed#", "retried#?", "purged#?", "note"),
    )
    cells = [
        (
            q.name,
            *(_number(q, name) for name in ("ready", "running", "scheduled", "waiting")),
            "-" if "oldest" in q.unknown else console.ago(q.oldest),
            *(_number(q, name) for name in ("succeeded", "failed", "retried", "purged")),
            console.styled("paused") if q.paused else _note(q, limits),
        )
        for q in rows
    ]
    return console.table(out, columns, cells)


def _number(row: QueueStats, name: str) -> str:
    return "-" if name in row.unknown else f"{getattr(row, name):,}"


def _note(row: QueueStats, limits: dict[str, LimitStats]) -> str:
    """The bounds and limits of a queue, in a few words."""
    limit = limits.get(row.name)
    parts = [f"at most {row.max_size:,}"] if row.max_size else []
    if row.carried:
        parts.append(f"{row.carried:,} with the carrier")
    if row.consumers >= 0:
        parts.append(f"{row.consumers:,} consumers")
    if limit is not None:
        parts += [terms_text(limit.terms), state_of(limit)]
    return "; ".join(part for part in parts if part)


@click.command()
@json_option
@store_options
def queues(mill: Tidemill, as_json: bool) -> None:
    """List queues with their numbers of jobs; totals count from the creation of the store."""
    from tidemill.cli import console

    rows, out = mill.queues(), console.console()
    if as_json:
        console.print_json({"queues": [row.public() for row in rows]})
    elif not rows:
        out.print(f"no queues in {mill.broker.url}")
    else:
        out.print(queues_table(mill, out, rows))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="QUEUE…")
@store_options
def pause(mill: Tidemill, names: tuple[str, ...]) -> None:
    """Pause queues: running jobs go on, puts are accepted, but no job starts."""
    _set_paused(mill, names, True)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="QUEUE…")
@store_options
def resume(mill: Tidemill, names: tuple[str, ...]) -> None:
    """Resume paused queues: their jobs start again."""
    _set_paused(mill, names, False)


def _set_paused(mill: Tidemill, names: tuple[str, ...], paused: bool) -> None:
    known = {row.name: row for row in mill.queues()}
    for name in names:
        check_name("queue", name)
        if not paused and name not in known:
            raise _unknown(name, list(known))
    for name in names:
        mill.broker.set_queue(name, paused=paused)
        note = "" if name in known else "; it has had no jobs yet"
        click.echo(f"{name} {'is paused' if paused else 'goes on'}{note}")


@click.command()
@click.argument("queue")
@click.option("--yes", is_flag=True, help="Delete without asking for the queue's name.")
@json_option
@store_options
def purge(mill: Tidemill, queue: str, yes: bool, as_json: bool) -> None:
    """Delete all jobs of a queue that are neither running nor finished."""
    rows = {row.name: row for row in mill.queues()}
    if queue not in rows:
        raise _unknown(queue, list(rows))
    count = rows[queue].size - rows[queue].running
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"this deletes {count:,} jobs; to go on add --yes")
        question = f"this deletes {count:,} jobs for good; type the queue's name to go on"
        if click.prompt(question, default="", show_default=False, err=True) != queue:
            click.echo("tidemill: that is not the queue's name; nothing was deleted", err=True)
            sys.exit(1)
    deleted = mill.broker.purge(queue)
    if as_json:
        from tidemill.cli.console import print_json

        print_json({"queue": queue, "deleted": deleted})
    else:
        click.echo(f"deleted {deleted:,} job{'' if deleted == 1 else 's'} of {queue}")


@click.command(name="delete-queue")
@click.argument("queue")
@click.option("--force", is_flag=True, help="Delete its jobs, too, including finished jobs.")
@json_option
@store_options
def delete_queue(mill: Tidemill, queue: str, force: bool, as_json: bool) -> None:
    """Delete a queue with its counters and settings.

    A queue with jobs, also finished jobs, is deleted only with --force. A queue with running jobs
    is never deleted.
    """
    deleted = mill.queue(queue).delete(force=force)
    if as_json:
        from tidemill.cli.console import print_json

        print_json({"queue": queue, "deleted": deleted})
    else:
        jobs = f"{deleted:,} job{'' if deleted == 1 else 's'}"
        click.echo(f"deleted queue {queue}, and {jobs} with it")


def _unknown(name: str, known: list[str]) -> TidemillError:
    names = ", ".join(known) or "none"
    return TidemillError(f"no queue has the name {name!r} here; known are: {names}")


@click.command()
@store_options
def recall(mill: Tidemill) -> None:
    """Send jobs to RabbitMQ again that RabbitMQ has lost.

    A job that RabbitMQ still has is delivered twice, and runs once.
    """
    if not isinstance(mill.broker, CarryingBroker):
        raise TidemillError(
            f"{mill.broker.url} has no carrier; only an amqp:// url with store= has one"
        )
    count = mill.broker.recall()
    click.echo(f"{count:,} jobs recalled from the carrier; it delivers them to the workers again")
