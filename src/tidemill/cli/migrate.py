"""``tidemill migrate``: the tables of a store, made or brought to this version."""

from __future__ import annotations

import click

from tidemill.brokers.schemes import grants_of, migrate_store
from tidemill.cli.connect import json_option

__all__ = ["migrate"]


@click.command()
@click.argument("url", metavar="URL", envvar="TIDEMILL_URL")
@click.option("--grants", default=None, metavar="ROLE", help="Only print the SQL for a role.")
@json_option
def migrate(url: str, grants: str | None, as_json: bool) -> None:
    """Make the tables of a store, or bring them to this version of tidemill.

    For postgresql:// urls; other stores make themselves. Any number may do this at once, and doing
    it again changes nothing. Do it before the workers of a new version start.

    With --grants nothing is changed: the SQL is printed that lets a role use the store. Run the SQL
    as the user that migrates.
    """
    from tidemill.cli import show

    if grants is not None:
        _print_grants(url, grants, as_json)
        return
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


def _print_grants(url: str, role: str, as_json: bool) -> None:
    from tidemill.cli import show

    statements = grants_of(url, role)
    if as_json:
        show.print_json({"grants": statements})
    else:
        click.echo("\n".join(statements or ["-- a store of this kind needs no grants"]))
