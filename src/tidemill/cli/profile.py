"""``tidemill profile``: a sampling profile of a worker while it works."""

from __future__ import annotations

import time

import click

from tidemill.app import Tidemill
from tidemill.cli.connect import json_option, store_options
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
from tidemill.core.errors import TidemillError

_TOP = 20  # functions of the table


@click.command()
@click.argument("worker", required=False, default="")
@click.option(
    "-s",
    "--seconds",
    type=click.FloatRange(0.1, LONGEST),
    default=10.0,
    show_default=True,
    help="The length of the profile.",
)
@click.option(
    "--hertz",
    type=click.FloatRange(1, MOST_HERTZ),
    default=100.0,
    show_default=True,
    help="Samples per second.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True),
    default=None,
    metavar="FILE",
    help="Write a flame graph (FILE.html), or collapsed stacks for other tools (any other name).",
)
@json_option
@store_options
def profile(
    mill: Tidemill, worker: str, seconds: float, hertz: float, output: str | None, as_json: bool
) -> None:
    """For some seconds, sample what the jobs of a worker do. The worker may be on another machine.

    WORKER is the name of the worker, or a beginning of the name. With a single worker it can be
    left out. Samples count wall time: a job that waits counts as a job that computes.
    """
    from tidemill.cli import console

    owner = find_worker(mill.broker, worker)
    if not as_json:
        click.echo(f"sampling {owner.name} for {seconds:g} s …", err=True)
    report = ask_worker(mill.broker, owner, "profile", seconds, hertz)
    if output is not None:
        _write(output, report, seconds)
    if as_json:
        console.print_json(
            {
                "worker": report.worker,
                "seconds": seconds,
                "samples": report.samples,
                "stacks": report.stacks,
                "silent": report.silent,
            }
        )
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
