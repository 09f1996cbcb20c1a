"""The command line. One file a family of verbs; this one gathers them."""

from __future__ import annotations

import click

from tidemill import __version__
from tidemill.cli.worker import worker

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """tidemill: durable background jobs, from one directory on disk up."""


main.add_command(worker)
