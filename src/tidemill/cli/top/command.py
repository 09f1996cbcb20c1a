"""``tidemill top``: the command, and the loop that reads the store and shows frames."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import click
import msgspec

from tidemill.app import Tidemill
from tidemill.cli.connect import store_options
from tidemill.cli.jobs import job_lines
from tidemill.cli.top import tables
from tidemill.cli.top.rates import Meter
from tidemill.cli.top.snapshot import Snapshot, take
from tidemill.cli.top.view import View, lacking
from tidemill.core.errors import TidemillError

_FIRST = 1.0
"""The most seconds between the two reads of ``--once`` on a store without history."""


@click.command()
@click.option(
    "-i",
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two looks at the store.",
)
@click.option("--once", is_flag=True, help="Print one table and end.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on one line for each look."
)
@store_options
def top(mill: Tidemill, interval: float, once: bool, as_json: bool) -> None:
    """Show queues, rates, running jobs and workers, refreshed as they change.

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

    meter = Meter()
    snapshot = take(mill, meter)
    if not snapshot.missing and any(row.rates.out is None for row in snapshot.queues):
        threading.Event().wait(min(interval, _FIRST))
        snapshot = take(mill, meter)
    if as_json:
        console.print_json(snapshot.public())
        return
    out = console.console()
    out.print(tables.headline(snapshot) or "no job yet")
    if snapshot.missing:
        out.print(lacking(snapshot))
    if snapshot.queues:
        rows = tables.sorted_queues(snapshot, "depth")
        out.print("", tables.queues_table(out, rows), sep="\n")
    if snapshot.jobs:
        out.print("", tables.jobs_table(out, snapshot.jobs), sep="\n")
    if snapshot.workers:
        out.print("", tables.workers_table(out, snapshot.workers), sep="\n")


def _print_objects(mill: Tidemill, interval: float) -> None:
    """Print an object for each look until Ctrl-C."""
    meter, pause = Meter(), threading.Event()
    try:
        while True:
            click.echo(msgspec.json.encode(take(mill, meter).public()))
            sys.stdout.flush()
            pause.wait(interval)
    except KeyboardInterrupt:
        pass  # Ctrl-C ends the stream


class _Reader(threading.Thread):
    """Looks at the store again and again, so that keys work while the store does not answer."""

    def __init__(self, mill: Tidemill, view: View, interval: float, wake: Any) -> None:
        super().__init__(name="tidemill-top", daemon=True)
        self.again = threading.Event()
        self._mill = mill
        self._view = view
        self._interval = interval
        self._wake = wake
        self._meter = Meter()

    def run(self) -> None:
        while not self._view.over:
            began = time.monotonic()
            if not self._view.paused:
                self._look()
                self._wake()
            self.again.wait(max(0.05, self._interval - (time.monotonic() - began)))
            self.again.clear()

    def _look(self) -> None:
        view = self._view
        try:
            snapshot: Snapshot = take(self._mill, self._meter)
            if opened := view.opened:
                lines = job_lines(self._mill, opened)
                view.trail = lines if opened == view.opened else view.trail
        except TidemillError as error:
            view.error = str(error).splitlines()[0]
        else:
            view.snapshot, view.error = snapshot, ""


def _show(mill: Tidemill, interval: float) -> None:
    from tidemill.cli.top.terminal import Terminal

    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    view = View(mill.broker.url, bars=utf8)
    with Terminal() as terminal:
        reader = _Reader(mill, view, interval, terminal.wake)
        reader.start()
        try:
            while not view.over:
                size = terminal.size
                terminal.show(view.frame(*size), size)
                for key in terminal.keys(None):
                    opened = view.opened
                    view.press(key)
                    if view.opened != opened or key == "p":
                        reader.again.set()
        except KeyboardInterrupt:
            pass  # Ctrl-C ends top, as q does
        finally:
            view.over = True
            reader.again.set()
    reader.join(1.0)
