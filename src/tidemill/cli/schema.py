"""``tidemill migrate``: make the tables of a store, or update them to this version."""

from __future__ import annotations

import click

from tidemill.brokers.registry import grants_of, migrate_store
from tidemill.cli.connect import json_option


@click.command()
@click.argument("url", metavar="URL", envvar="TIDEMILL_URL")
@click.option(
    "--grants",
    default=None,
    metavar="ROLE",
    help="Only print the SQL that lets a role use the store.",
)
@json_option
def migrate(url: str, grants: str | None, as_json: bool) -> None:
    """Make the tables of a store, or update them to this version of tidemill.

    This is for postgresql:// URLs; other stores need no migration. Several migrations
    may run at once, and a second run changes nothing. Migrate before you start the workers of a new
    version.

    With --grants nothing changes: the command prints the SQL that lets a role use the store. Run
    the SQL as the user that migrates.
    """
    from tidemill.cli import console

    if grants is not None:
        _print_grants(url, grants, as_json)
        return
    versions = migrate_store(url)
    if as_json:
        before, after = versions or (None, None)
        console.print_json({"before": before, "after": after})
    elif versions is None:
        click.echo("a store of this kind needs no migration")
    elif versions[0] == versions[1]:
        click.echo(f"the store has version {versions[1]} already; its functions are up to date")
    else:
        click.echo(f"the store went from version {versions[0]} to {versions[1]}")


def _print_grants(url: str, role: str, as_json: bool) -> None:
    from tidemill.cli import console

    statements = grants_of(url, role)
    if as_json:
        console.print_json({"grants": statements})
    else:
        click.echo("\n".join(statements or ["-- a store of this kind needs no grants"]))
