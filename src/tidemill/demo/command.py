"""The command ``tidemill demo``."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument(
    "folder",
    metavar="[DIR]",
    default=".",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)
@click.option(
    "--store",
    default=".tidemill/demo",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the demo keeps its jobs, its report and the log of its worker.",
)
@click.option("--fresh", is_flag=True, help="Forget earlier runs and start over.")
@click.option(
    "-p",
    "--processes",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="The number of processes of the demo's worker.",
)
@click.option(
    "-c",
    "--concurrency",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Jobs at a time in each process.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
def demo(
    folder: Path, store: Path, fresh: bool, processes: int, concurrency: int, as_json: bool
) -> None:
    """Measure every file of DIR, one job per file, with a store and a worker of its own.

    Kill all processes of the demo with kill -9 in the middle, and start the demo again. It finishes
    the remaining jobs, and runs no finished job again.
    """
    from tidemill.demo.run import run

    workers = processes, concurrency
    sys.exit(run(folder.absolute(), store.absolute(), workers, fresh=fresh, quiet=as_json))
