"""The verbs of queues: ``tidemill queues``, ``pause``, ``purge``, ``restore``, ``delete-queue``."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import QueueStats
from tidemill.brokers.generic import purges as kept
from tidemill.brokers.generic.topics import bindings
from tidemill.cli import console
from tidemill.cli.connect import audit, store_options
from tidemill.client.queues import no_such_queue
from tidemill.core.config import check_name
from tidemill.core.words import counted
from tidemill.doctor.queues import state_of_limit
from tidemill.limits.arithmetic import LimitStats
from tidemill.limits.declare import terms_text

if TYPE_CHECKING:
    from rich.console import Console


_MOST_PATTERNS = 3  # the most patterns of a queue that a table names; it counts the others


def public(mill: Tidemill, rows: list[QueueStats]) -> list[dict[str, Any]]:
    """Queues for programs: their numbers, and their bindings where the broker has topics."""
    has = Feature.TOPICS in mill.broker.features
    bound = _patterns(mill)
    return [row.public() | ({"bindings": bound.get(row.name, [])} if has else {}) for row in rows]


def _patterns(mill: Tidemill) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    if Feature.TOPICS in mill.broker.features:
        for binding in bindings(mill.broker).table:
            found.setdefault(binding.queue, []).append(binding.pattern)
    return found


def queues_table(mill: Tidemill, out: Console, rows: list[QueueStats]) -> console.Table:
    has = Feature.LIMITS in mill.broker.features
    limits = {row.name: row for row in mill.limits.list() if row.queue} if has else {}
    bound = _patterns(mill)

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
            console.styled("paused") if q.paused else _note(q, limits, bound.get(q.name, [])),
        )
        for q in rows
    ]
    return console.table(out, columns, cells)


def _number(row: QueueStats, name: str) -> str:
    return "-" if name in row.unknown else f"{getattr(row, name):,}"


def _note(row: QueueStats, limits: dict[str, LimitStats], patterns: list[str]) -> str:
    """The bounds, limits and bindings of a queue, in a few words."""
    limit = limits.get(row.name)
    parts = [f"at most {row.max_size:,}"] if row.max_size else []
    if row.consumers >= 0:
        parts.append(f"{row.consumers:,} consumers")
    if limit is not None:
        parts += [terms_text(limit.terms), state_of_limit(limit)]
    if len(patterns) > _MOST_PATTERNS:
        parts.append(f"bound to {len(patterns):,} patterns")
    elif patterns:
        parts.append(f"bound to {', '.join(patterns)}")
    return "; ".join(part for part in parts if part)


@click.command()
@store_options
def queues(mill: Tidemill, as_json: bool) -> None:
    """List queues with their numbers of jobs.

    Totals count from the creation of the store.
    """
    rows, out = mill.queues(), console.console()
    if as_json:
        console.print_json({"queues": public(mill, rows)})
    elif not rows:
        out.print(f"no queues in {mill.broker.url}")
    else:
        out.print(queues_table(mill, out, rows))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="QUEUE…")
@store_options
def pause(mill: Tidemill, names: tuple[str, ...], as_json: bool) -> None:
    """Pause queues: no job starts.

    Running jobs go on, and puts are accepted.
    """
    _set_paused(mill, names, True, as_json)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="QUEUE…")
@store_options
def resume(mill: Tidemill, names: tuple[str, ...], as_json: bool) -> None:
    """Resume paused queues: their jobs start again."""
    _set_paused(mill, names, False, as_json)


def _set_paused(mill: Tidemill, names: tuple[str, ...], paused: bool, as_json: bool) -> None:
    known = {row.name: row for row in mill.queues()}
    for name in names:
        check_name("queue", name)
        if not paused and name not in known:
            raise no_such_queue(name, known)
    for name in names:
        mill.broker.set_queue(name, paused=paused)
        audit(mill.broker, f"{'paused' if paused else 'resumed'} queue", name)
    how = "is paused" if paused else "goes on"
    lines = [f"{name} {how}{'' if name in known else '; it has had no jobs yet'}" for name in names]
    console.answer({"queues": names, "paused": paused}, as_json, *lines)


@click.command(name="delete-queue")
@click.argument("queue")
@click.option("--force", is_flag=True, help="Delete its jobs, too, including finished jobs.")
@store_options
def delete_queue(mill: Tidemill, queue: str, force: bool, as_json: bool) -> None:
    """Delete a queue with its counters, settings and bindings.

    A queue with jobs, also finished jobs, is deleted only with --force. A queue with running jobs
    is never deleted.
    """
    deleted = mill.queue(queue).delete(force=force)
    audit(mill.broker, "deleted queue", queue, deleted)
    console.answer(
        {"queue": queue, "deleted": deleted},
        as_json,
        f"deleted queue {queue}, and {counted(deleted, 'job')} with it",
    )


@click.command()
@click.argument("queue")
@click.option("--now", is_flag=True, help="Delete the jobs for good; keep nothing to restore.")
@click.option("--yes", is_flag=True, help="Purge without asking for the queue's name.")
@store_options
def purge(mill: Tidemill, queue: str, now: bool, yes: bool, as_json: bool) -> None:
    """Delete jobs of a queue that are neither running nor finished.

    The jobs are kept for a while, so that `tidemill restore` can bring them back.
    """
    rows = {row.name: row for row in mill.queues()}
    if queue not in rows:
        raise no_such_queue(queue, rows)
    count = rows[queue].size - rows[queue].running
    if not yes:
        is_kept = Feature.INSPECT in mill.broker.features and not now
        how = f"; 'tidemill restore {queue}' brings them back" if is_kept else " for good"
        effect = f"this deletes {counted(count, 'job')}{how}"
        if not sys.stdin.isatty():
            raise click.UsageError(f"{effect}; to go on add --yes")
        question = f"{effect}; type the queue's name to go on"
        if click.prompt(question, default="", show_default=False, err=True) != queue:
            click.echo("tidemill: that is not the queue's name; nothing was deleted", err=True)
            sys.exit(1)
    purged = kept.purge(mill.broker, queue, now=now)
    audit(mill.broker, "purged queue", queue, purged.jobs)
    text = f"deleted {counted(purged.jobs, 'job')} of {queue}{_way_back(queue, purged)}"
    facts = {"queue": queue, "deleted": purged.jobs, "kept": purged.kept}
    console.answer(facts | {"purge": purged.id or None}, as_json, text)


def _way_back(queue: str, purged: kept.Purged) -> str:
    if not purged.kept:
        return ""
    which = "them" if purged.kept == purged.jobs else f"{purged.kept:,} of them"
    return f"; to bring {which} back: tidemill restore {queue}"


@click.command()
@click.argument("queue")
@store_options
def purges(mill: Tidemill, queue: str, as_json: bool) -> None:
    """List the purges of a queue that can be restored.

    The latest purge is the first.
    """
    found = kept.list_purges(mill.broker, queue)
    rows = [{"id": one.id, "at": one.at, "jobs": one.jobs} for one in found]
    cells = [(one.id, _moment(one.at), f"{one.jobs:,}" if one.jobs else "?") for one in found]
    none = f"no purge of {queue} can be restored"
    document = {"queue": queue, "purges": rows}
    console.answer_table(document, as_json, ("purge", "time", "jobs#"), cells, none)


@click.command()
@click.argument("queue")
@click.argument("purge", default="")
@store_options
def restore(mill: Tidemill, queue: str, purge: str, as_json: bool) -> None:
    """Bring back the jobs of the latest purge, or of the given one.

    A job stays purged when another job has its key by now; the same command may bring it back
    later. A job that has expired, or belongs to a flow, stays purged for good.
    """
    restored = kept.restore(mill.broker, queue, purge)
    audit(mill.broker, "restored queue", queue, restored.jobs)
    left = f"; {counted(restored.left, 'job')} stay purged" if restored.left else ""
    console.answer(
        {"queue": queue, "restored": restored.jobs, "left": restored.left},
        as_json,
        f"restored {counted(restored.jobs, 'job')} of {queue}{left}",
    )


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
