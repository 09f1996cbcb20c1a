"""``tidemill workers``: list the workers, and show the stacks of one."""

from __future__ import annotations

from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.cli.connect import json_option, store_options
from tidemill.client.worker_reports import ask_worker, find_worker


@click.group()
def workers() -> None:
    """List the workers of a store, and show what one of them is doing."""


@workers.command(name="list")
@json_option
@store_options
def list_(mill: Tidemill, as_json: bool) -> None:
    """List workers and consumers that are alive."""
    from tidemill.cli import console

    owners = sorted(mill.broker.owners(), key=lambda owner: (owner.name, owner.id))
    if as_json:
        names = ("id", "kind", "name", "host", "pid", "started", "queues", "concurrency", "version")
        rows: list[dict[str, Any]] = [{n: getattr(o, n) for n in names} for o in owners]
        console.print_json({"workers": rows})
        return
    out = console.console()
    if not owners:
        out.print("no workers: start one with tidemill worker MODULE:VAR")
        return
    cells = [
        (
            *(o.name, o.kind, ", ".join(o.queues) or "all", o.concurrency or "-"),
            *(console.ago(o.started), o.host, o.pid),
        )
        for o in owners
    ]
    columns = ("worker", "kind", "queues…?", "slots#?", "up#?", "host?", "pid#?")
    out.print(console.table(out, columns, cells))


@workers.command()
@click.argument("worker", required=False, default="")
@json_option
@store_options
def dump(mill: Tidemill, worker: str, as_json: bool) -> None:
    """Print the stacks of all threads of a worker, also of a worker on another machine.

    WORKER is the name of the worker, or a beginning of the name. With a single worker it can be
    left out.
    """
    from tidemill.cli import console

    report = ask_worker(mill.broker, find_worker(mill.broker, worker), "dump")
    if as_json:
        processes = [{"pid": a.pid, "stacks": a.stacks} for a in report.answers]
        console.print_json(
            {"worker": report.worker, "processes": processes, "silent": report.silent}
        )
        return
    for answer in report.answers:
        click.echo(f"--- stacks of worker process {answer.pid}\n{console.clean(answer.stacks)}")
    for pid in report.silent:
        click.echo(f"--- worker process {pid} does not answer", err=True)
