"""``tidemill info`` and ``backup``: show the store, and copy it."""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import totals_of
from tidemill.cli.connect import json_option, store_options
from tidemill.cli.queues import queues_table
from tidemill.core.config import lmdb_url
from tidemill.core.errors import TidemillError
from tidemill.core.job import Owner

__all__ = ["backup", "info"]


@click.command()
@json_option
@store_options
def info(mill: Tidemill, as_json: bool) -> None:
    """Show the store, its queues and its workers."""
    from tidemill.cli import console

    facts, rows, owners = mill.broker.info(), mill.queues(), mill.broker.owners()
    knows = Feature.INSPECT in mill.broker.features
    totals = totals_of(rows, knows=knows)
    if as_json:
        workers = [_public(owner) for owner in owners] if knows else None
        queues = [row.public() for row in rows]
        console.print_json({"store": facts, "totals": totals, "queues": queues, "workers": workers})
        return
    out = console.console()
    for name, value in facts.items():
        shown = console.size(value) if name.endswith("_bytes") else str(value)
        out.print(f"{name.removesuffix('_bytes'):<9} {console.clean(shown, one_line=True)}")
    counts = ", ".join(f"{count:,} {name}" for name, count in totals.items() if count)
    out.print(f"totals    {counts or 'nothing yet'}")
    if rows:
        out.print()
        out.print(queues_table(mill, out, rows))
    out.print()
    if not knows:
        out.print(
            "workers   this broker has no list of workers; the consumers of each queue are above"
        )
        return
    if not owners:
        out.print("no workers: start one with tidemill worker MODULE:VAR")
        return
    cells = [
        (o.name, o.kind, ", ".join(o.queues) or "all", o.concurrency or "-", console.ago(o.started))
        for o in owners
    ]
    out.print(console.table(out, ("worker", "kind", "queues…?", "slots#?", "up#?"), cells))


def _public(owner: Owner) -> dict[str, Any]:
    names = ("id", "kind", "name", "host", "pid", "started", "queues", "concurrency")
    return {name: getattr(owner, name) for name in names}


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False))
@json_option
@store_options
def backup(mill: Tidemill, folder: str, as_json: bool) -> None:
    """Copy the store to DIR while it is in use; the copy opens as a store."""
    target = os.path.abspath(folder)
    try:
        mill.broker.backup(target)
        count = sum(entry.stat().st_size for entry in os.scandir(target) if entry.is_file())
    except OSError as error:
        raise TidemillError(f"cannot back up to {target}: {error.strerror or error}") from error
    from tidemill.cli import console

    if as_json:
        console.print_json({"folder": target, "bytes": count})
    else:
        url = shlex.quote(lmdb_url(target))
        click.echo(f"copied to {target}, {console.size(count)}; it opens as a store: --url {url}")
