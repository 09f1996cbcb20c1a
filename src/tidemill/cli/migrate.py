"""``tidemill migrate``: the tables of a store, made or brought to this version."""

from __future__ import annotations

import click

from tidemill.brokers.schemes import migrate_store
from tidemill.cli.connect import json_option

__all__ = ["migrate"]


@click.command()
@click.argument("url", metavar="URL", envvar="TIDEMILL_URL")
@json_option
def migrate(url: str, as_json: bool) -> None:
    """Make the tables of a store, or bring them to this version of tidemill.

    For postgresql:// urls; other stores make themselves. Any number may do this at once, and doing
    it again changes nothing. Do it before the workers of a new version start.
    """
    from tidemill.cli import show

    versions = migrate_store(url)
    if as_json:
        before, after = versions or (None, None)
        show.print_json({"before": before, "after": after})
    elif versions is None:
        click.echo("a store of this kind needs no migration")
    elif versions[0] == versions[1]:
        click.echo(f"the store has version {versions[1]} already; its functions are up to date")
    else:
        click.echo(f"the store went from version {versions[0]} to {versions[1]}")
