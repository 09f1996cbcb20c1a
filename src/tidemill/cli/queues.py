"""``tidemill queues``, ``pause``, ``resume``, ``purge`` and ``delete-queue``: whole queues."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from tidemill.app import Tidemill
from tidemill.brokers.base import Feature, QueueStats
from tidemill.brokers.carrying import CarryingBroker
from tidemill.cli.connect import json_option, store_options
from tidemill.cli.limits import state_of
from tidemill.config import check_name
from tidemill.errors import TidemillError
from tidemill.gate import LimitStats
from tidemill.limits import terms_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["delete_queue", "pause", "purge", "queues", "queues_table", "recall", "resume"]


def queues_table(mill: Tidemill, out: Console, rows: list[QueueStats]) -> Table:
    """Queues in numbers, for people. ``oldest`` is the age of the oldest ready job."""
    has = Feature.LIMITS in mill.broker.features
    limits = {row.name: row for row in mill.limits.list() if row.queue} if has else {}
    from tidemill.cli import show

    columns = (
        *("queue", "ready#", "running#", "scheduled#?", "waiting#?", "oldest#?"),
        *("succeeded#?", "failed#", "retried#?", "purged#?", "note"),
    )
    cells = [
        (
            q.name,
            *(_number(q, name) for name in ("ready", "running", "scheduled", "waiting")),
            "-" if "oldest" in q.unknown else show.ago(q.oldest),
            *(_number(q, name) for name in ("succeeded", "failed", "retried", "purged")),
            show.styled("paused") if q.paused else _note(q, limits),
        )
        for q in rows
    ]
    return show.table(out, columns, cells)


def _number(row: QueueStats, name: str) -> str:
    return "-" if name in row.unknown else f"{getattr(row, name):,}"


def _note(row: QueueStats, limits: dict[str, LimitStats]) -> str:
    """What bounds a queue, in a few words."""
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
    """List queues with their numbers; totals count since the store was made."""
    from tidemill.cli import show

    rows, out = mill.queues(), show.console()
    if as_json:
        show.print_json({"queues": [row.public() for row in rows]})
    elif not rows:
        out.print(f"no queues in {mill.broker.url}")
    else:
        out.print(queues_table(mill, out, rows))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="QUEUE…")
@store_options
def pause(mill: Tidemill, names: tuple[str, ...]) -> None:
    """Start no more jobs of a queue. What runs goes on; jobs are still accepted."""
    _set_paused(mill, names, True)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="QUEUE…")
@store_options
def resume(mill: Tidemill, names: tuple[str, ...]) -> None:
    """Start jobs of a paused queue again."""
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
@click.option("--yes", is_flag=True, help="Do not ask for the queue's name.")
@json_option
@store_options
def purge(mill: Tidemill, queue: str, yes: bool, as_json: bool) -> None:
    """Delete every job of a queue that is neither running nor finished."""
    rows = {row.name: row for row in mill.queues()}
    if queue not in rows:
        raise _unknown(queue, list(rows))
    count = rows[queue].size - rows[queue].running
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"this deletes {count:,} jobs; to go on add --yes")
        question = f"this deletes {count:,} jobs for good; type the queue's name to go on"
        if click.prompt(question, default="", show_default=False, err=True) != queue:
            click.echo("tidemill: that is not its name; nothing was deleted", err=True)
            sys.exit(1)
    deleted = mill.broker.purge(queue)
    if as_json:
        from tidemill.cli.show import print_json

        print_json({"queue": queue, "deleted": deleted})
    else:
        click.echo(f"deleted {deleted:,} job{'' if deleted == 1 else 's'} of {queue}")


@click.command(name="delete-queue")
@click.argument("queue")
@click.option("--force", is_flag=True, help="Delete its jobs, too, finished ones among them.")
@json_option
@store_options
def delete_queue(mill: Tidemill, queue: str, force: bool, as_json: bool) -> None:
    """Delete a queue with its counters and settings.

    A queue that has jobs, or keeps finished jobs, is refused without --force; one that has
    running jobs always.
    """
    deleted = mill.queue(queue).delete(force=force)
    if as_json:
        from tidemill.cli.show import print_json

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
    """Have what RabbitMQ should bring to the workers, and lost, brought once more.

    What it did not lose is brought twice, and runs once.
    """
    if not isinstance(mill.broker, CarryingBroker):
        raise TidemillError(
            f"{mill.broker.url} has no carrier; only an amqp:// url with store= has one"
        )
    count = mill.broker.recall()
    click.echo(f"{count:,} jobs called back from the carrier; workers have them brought once more")
