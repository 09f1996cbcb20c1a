"""``tidemill info``, ``backup`` and ``migrate``: show the store, copy it, make its tables."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import totals_of
from tidemill.brokers.registry import grants_of, migrate_store
from tidemill.cli import console
from tidemill.cli.connect import json_option, store_options
from tidemill.cli.queues import public, queues_table
from tidemill.cli.workers import OWNER_COLUMNS, owner_row, public_owner
from tidemill.client.history import TaskNumbers
from tidemill.core.clock import clock
from tidemill.core.config import lmdb_url
from tidemill.doctor import words
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@store_options
def info(mill: Tidemill, as_json: bool) -> None:
    """Show the store, its queues, its workers and its latest runs.

    The runs are those of the last hour, by task.
    """
    facts, rows, owners = mill.broker.info(), mill.queues(), mill.broker.owners()
    knows = Feature.INSPECT in mill.broker.features
    totals = totals_of(rows, knows=knows)
    tasks = _last_hour(mill, facts) if Feature.HISTORY in mill.broker.features else None
    if as_json:
        document: dict[str, Any] = {"store": facts, "totals": totals}
        document["queues"] = public(mill, rows)
        document["workers"] = [public_owner(owner) for owner in owners] if knows else None
        document["last_hour"] = [_public_task(one) for one in tasks] if tasks is not None else None
        console.print_json(document)
        return
    out = console.console()
    for name, value in facts.items():
        shown = words.size(value) if name.endswith("_bytes") else str(value)
        shown = console.ago(value) if name == "made" else shown
        out.print(f"{name.removesuffix('_bytes'):<9} {console.clean(shown, one_line=True)}")
    counts = ", ".join(f"{count:,} {name}" for name, count in totals.items() if count)
    out.print(f"totals    {counts or 'nothing yet'}")
    if rows:
        out.print()
        out.print(queues_table(mill, out, rows))
    if tasks:
        out.print()
        out.print(_tasks_table(out, tasks))
    out.print()
    if not knows:
        out.print(
            "workers   this broker has no list of workers; the consumers of each queue are above"
        )
        return
    if not owners:
        out.print("no workers: start one with tidemill worker MODULE:VAR")
        return
    out.print(console.table(out, OWNER_COLUMNS, map(owner_row, owners)))


def _last_hour(mill: Tidemill, facts: dict[str, Any]) -> list[TaskNumbers]:
    """The runs of the last hour. The rates of a younger store are over its age."""
    tasks, age = mill.history.tasks(), max(1.0, clock.wall() - facts.get("made", 0.0))
    if age >= 3600 or mill.history.tasks(until=age):  # the runs of a store that moved are older
        return tasks
    return [msgspec.structs.replace(one, seconds=age) for one in tasks]


def _tasks_table(out: Console, tasks: list[TaskNumbers]) -> console.Table:
    columns = (
        *("last hour", "queue", "succeeded#", "failed#", "retried#", "per minute#?"),
        *("wait p50#?", "wait p95#", "run p50#?", "run p95#"),
    )
    cells = [
        (
            *(one.task, one.queue),
            *(f"{count:,}" for count in (one.succeeded, one.failed, one.retried)),
            f"{60 * one.rate:,.1f}",
            *(_time(value) for value in (one.wait.p50, one.wait.p95, one.run.p50, one.run.p95)),
        )
        for one in tasks
    ]
    return console.table(out, columns, cells)


def _time(seconds: float | None) -> str:
    """A percentile in two digits; percentiles are right only within a factor of two."""
    if seconds is None:
        return "-"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:,.0f} s"


def _public_task(one: TaskNumbers) -> dict[str, Any]:
    counts = ("queue", "task", "succeeded", "failed", "retried", "cancelled", "given_back")
    percentiles = {
        f"{name}_{part}": getattr(getattr(one, name), part)
        for name in ("wait", "run")
        for part in ("p50", "p95", "p99")
    }
    return {name: getattr(one, name) for name in counts} | percentiles


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@store_options
def backup(mill: Tidemill, folder: str, as_json: bool) -> None:
    """Copy the store to DIR while it is in use.

    The copy opens as a store.
    """
    target = os.path.abspath(folder)
    try:
        mill.broker.backup(target)
        count = sum(entry.stat().st_size for entry in os.scandir(target) if entry.is_file())
    except OSError as error:
        raise TidemillError(f"cannot back up to {target}: {error.strerror or error}") from error

    url = shlex.quote(lmdb_url(target))
    console.answer(
        {"folder": target, "bytes": count},
        as_json,
        f"copied to {target}, {words.size(count)}; it opens as a store: --url {url}",
    )


@click.command()
@click.argument("url", metavar="URL", envvar="TIDEMILL_URL")
@click.option(
    "--grants",
    metavar="ROLE",
    help="Only print the SQL that lets a role use the store.",
)
@json_option
def migrate(url: str, grants: str | None, as_json: bool) -> None:
    """Make the tables of a store, or update them to this version.

    This is for postgresql:// URLs; other stores need no migration. Several migrations
    may run at once, and a second run changes nothing. Migrate before you start the workers of a new
    version.

    With --grants nothing changes: the command prints the SQL that lets a role use the store. Run
    the SQL as the user that migrates.
    """
    if grants is not None:
        statements = grants_of(url, grants)
        lines = statements or ["-- a store of this kind needs no grants"]
        console.answer({"grants": statements}, as_json, *lines)
        return
    versions = migrate_store(url)
    before, after = versions or (None, None)
    if versions is None:
        text = "a store of this kind needs no migration"
    elif before == after:
        text = f"the store has version {after} already; its functions are up to date"
    else:
        text = f"the store went from version {before} to {after}"
    console.answer({"before": before, "after": after}, as_json, text)
