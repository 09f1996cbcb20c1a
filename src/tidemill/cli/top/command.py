"""``tidemill top``: the command, and the loop that reads the store and shows frames."""

from __future__ import annotations

import os
import sys
import threading

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.cli.connect import open_options, with_default
from tidemill.cli.top.snapshot import Meter, take

_FIRST = 1.0  # the most seconds between the two reads of ``--once`` on a store without history


@click.command()
@with_default(
    "-i --interval",
    click.FloatRange(0.1, 3600),
    2.0,
    "Seconds between two looks at the store.",
    metavar="SECONDS",
)
@click.option("--once", is_flag=True, help="Print one table and end.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on one line for each look."
)
@open_options
def top(mill: Tidemill, interval: float, once: bool, as_json: bool) -> None:
    """Show queues, rates, running jobs and workers as they change.

    Keys: q ends, j and k select a running job, enter shows its trail, s sorts, p pauses, ? helps.
    top only reads. With --once it prints one table, and with --json objects for programs.
    """
    if once:
        _print_once(mill, interval, as_json)
    elif as_json:
        _print_objects(mill, interval)
    elif not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise click.UsageError("top needs a terminal; elsewhere add --once or --json")
    else:
        _show(mill, interval)


def _print_once(mill: Tidemill, interval: float, as_json: bool) -> None:
    from tidemill.cli import console
    from tidemill.cli.top import view

    meter = Meter()
    snapshot = take(mill, meter)
    if not snapshot.missing and any(row.rates.out is None for row in snapshot.queues):
        threading.Event().wait(min(interval, _FIRST))
        snapshot = take(mill, meter)
    if as_json:
        console.print_json(snapshot.public())
        return
    out = console.console()
    out.print(view.headline(snapshot) or "no job yet")
    if snapshot.missing:
        out.print(view.lacking(snapshot))
    if snapshot.moved:
        out.print(snapshot.moved)
    shown = (
        snapshot.queues and view.queues_table(out, view.sorted_queues(snapshot, "depth")),
        snapshot.jobs and view.jobs_table(out, snapshot.jobs),
        snapshot.workers and view.workers_table(out, snapshot.workers),
    )
    for table in filter(None, shown):
        out.print("", table, sep="\n")


def _print_objects(mill: Tidemill, interval: float) -> None:
    meter, pause = Meter(), threading.Event()
    try:
        while True:
            click.echo(msgspec.json.encode(take(mill, meter).public()))
            sys.stdout.flush()
            pause.wait(interval)
    except KeyboardInterrupt:
        pass  # Ctrl-C ends the stream


def _show(mill: Tidemill, interval: float) -> None:
    from tidemill.cli.top.view import Terminal, View

    view, again = View(mill), threading.Event()
    terminal = Terminal(view)

    def read() -> None:
        while not view.over:
            again.clear()
            if not view.paused:
                view.look()
                terminal.wake()
            again.wait(interval)

    reader = threading.Thread(target=read, name="tidemill-top", daemon=True)
    try:
        terminal.begin()
        reader.start()
        while not view.over:
            terminal.show()
            for key in terminal.read_keys():
                if view.press(key):
                    again.set()
    finally:
        view.over = True
        again.set()
        terminal.end()
    reader.join(1.0)
