"""``tidemill migrate``: make the tables of a store, or update them to this version."""

from __future__ import annotations

import click

from tidemill.brokers.registry import grants_of, migrate_store
from tidemill.cli import console
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
    """Make the tables of a store, or update them to this version.

    This is for postgresql:// URLs; other stores need no migration. Several migrations
    may run at once, and a second run changes nothing. Migrate before you start the workers of a new
    version.

    With --grants nothing changes: the command prints the SQL that lets a role use the store. Run
    the SQL as the user that migrates.
    """
    if grants is not None:
        _print_grants(url, grants, as_json)
        return
    versions = migrate_store(url)
    before, after = versions or (None, None)
    if versions is None:
        text = "a store of this kind needs no migration"
    elif before == after:
        text = f"the store has version {after} already; its functions are up to date"
    else:
        text = f"the store went from version {before} to {after}"
    console.answer({"before": before, "after": after}, as_json, text)


def _print_grants(url: str, role: str, as_json: bool) -> None:
    statements = grants_of(url, role)
    console.answer(
        {"grants": statements},
        as_json,
        "\n".join(statements or ["-- a store of this kind needs no grants"]),
    )
