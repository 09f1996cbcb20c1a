"""``tidemill workers`` and ``profile``: list the workers, and show what one of them does."""

from __future__ import annotations

import time
from typing import Any

import click

from tidemill.app import Tidemill
from tidemill.cli import console
from tidemill.cli.connect import store_options, with_default
from tidemill.client.worker_reports import (
    LONGEST,
    MOST_HERTZ,
    Report,
    ask_worker,
    collapsed,
    find_worker,
    flame_graph,
    top_functions,
)
from tidemill.core.job import Owner
from tidemill.errors import TidemillError


@click.group()
def workers() -> None:
    """List the workers of a store, or show what a worker is doing."""


@workers.command(name="list")
@store_options
def list_(mill: Tidemill, as_json: bool) -> None:
    """List workers and consumers that are alive."""
    owners = sorted(mill.broker.owners(), key=lambda owner: (owner.name, owner.id))
    document = {"workers": [public_owner(owner) for owner in owners]}
    none = "no workers: start one with tidemill worker MODULE:VAR"
    console.answer_table(document, as_json, OWNER_COLUMNS, map(owner_row, owners), none)


def public_owner(owner: Owner) -> dict[str, Any]:
    names = ("id", "kind", "name", "host", "pid", "started", "queues", "concurrency", "version")
    return {name: getattr(owner, name) for name in names}


OWNER_COLUMNS = ("worker", "kind", "queues…?", "slots#?", "up#?", "host?", "pid#?")


def owner_row(owner: Owner) -> tuple[object, ...]:
    return (
        *(owner.name, owner.kind, ", ".join(owner.queues) or "all", owner.concurrency or "-"),
        *(console.ago(owner.started), owner.host, owner.pid),
    )


@workers.command()
@click.argument("worker", required=False, default="")
@store_options
def dump(mill: Tidemill, worker: str, as_json: bool) -> None:
    """Print the stacks of all threads of a worker, also of a worker on another machine.

    WORKER is the name of the worker, or a beginning of the name. With a single worker it can be
    left out.
    """
    report = ask_worker(mill.broker, find_worker(mill.broker, worker), "dump")
    if as_json:
        processes = [{"pid": a.pid, "stacks": a.stacks} for a in report.answers]
        facts = {"worker": report.worker, "processes": processes, "silent": report.silent}
        console.print_json(facts)
        return
    for answer in report.answers:
        click.echo(f"--- stacks of worker process {answer.pid}\n{console.clean(answer.stacks)}")
    for pid in report.silent:
        click.echo(f"--- worker process {pid} does not answer", err=True)


_TOP = 20  # functions of the table


@click.command()
@click.argument("worker", required=False, default="")
@with_default("-s --seconds", click.FloatRange(0.1, LONGEST), 10.0, "The length of the profile.")
@with_default("--hertz", click.FloatRange(1, MOST_HERTZ), 100.0, "Samples per second.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True),
    metavar="FILE",
    help="Write a flame graph (FILE.html), or collapsed stacks for other tools (any other name).",
)
@store_options
def profile(
    mill: Tidemill, worker: str, seconds: float, hertz: float, output: str | None, as_json: bool
) -> None:
    """For some seconds, sample what the jobs of a worker do.

    The worker may be on another machine.

    WORKER is the name of the worker, or a beginning of the name. With a single worker it can be
    left out. Samples count wall time: a job that waits counts as a job that computes.
    """
    owner = find_worker(mill.broker, worker)
    if not as_json:
        click.echo(f"sampling {owner.name} for {seconds:g} s …", err=True)
    report = ask_worker(mill.broker, owner, "profile", seconds, hertz)
    if output is not None:
        _write(output, report, seconds)
    if as_json:
        facts = {name: getattr(report, name) for name in ("worker", "samples", "stacks", "silent")}
        console.print_json({"seconds": seconds, **facts})
        return
    out = console.console()
    rows = [
        (f"{own:.1%}", f"{total:.1%}", name)
        for name, own, total in top_functions(report.stacks)[:_TOP]
    ]
    out.print(_note(report, seconds))
    if rows:
        out.print(console.table(out, ("self#", "total#", "function…"), rows))
    else:
        out.print("no job ran meanwhile")
    if output is not None:
        out.print(f"written to {output}")


def _note(report: Report, seconds: float) -> str:
    processes = len(report.answers)
    text = f"{processes} process{'' if processes == 1 else 'es'}, {seconds:g} s"
    text = f"{text}, {report.samples:,} looks, {sum(report.stacks.values()):,} samples of jobs"
    silent = ", ".join(map(str, report.silent))
    return f"{text}; no answer of process {silent}" if silent else text


def _write(path: str, report: Report, seconds: float) -> None:
    stacks = report.stacks
    if path.lower().endswith((".html", ".htm")):
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        text = flame_graph(stacks, f"{report.worker}, {moment}", _note(report, seconds))
    else:
        text = collapsed(stacks)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise TidemillError(f"cannot write {path}: {error.strerror or error}") from error
