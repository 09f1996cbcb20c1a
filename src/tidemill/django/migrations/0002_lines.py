"""Indexes to find jobs of unknown tasks, and ready jobs under limits, in their order.

Each statement may be repeated: MariaDB keeps the first half of a migration that failed.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations

_INDEXES = {
    "aside": (["task", "queue", "rank", "seq"], "unknown = 1"),
    "limited": (["share", "queue", "rank", "seq"], "state = 2 AND share <> ''"),
}
_SHARE = ["share", "state", "rank", "seq"], "share <> ''"
"""The index of the first migration, which ``limited`` replaces."""


def make_indexes(apps: Any, editor: Any) -> None:
    """Make the indexes. MariaDB lacks partial indexes, and has too short keys for ``limited``."""
    mariadb = editor.connection.vendor == "mysql"
    for name, (columns, where) in _INDEXES.items():
        if mariadb and name == "limited":
            continue  # MariaDB keeps the index of the first migration
        _make(editor, name, ["unknown", *columns] if mariadb else columns, where)
    if not mariadb:
        _drop(editor, "share")


def drop_indexes(apps: Any, editor: Any) -> None:
    """Bring back the indexes of the first migration."""
    if editor.connection.vendor != "mysql":
        _make(editor, "share", *_SHARE)
    for name in _INDEXES:
        _drop(editor, name)


def _make(editor: Any, name: str, columns: list[str], where: str) -> None:
    listed = ", ".join(map(editor.quote_name, columns))
    partial = "" if editor.connection.vendor == "mysql" else f" WHERE {where}"
    index = f"INDEX IF NOT EXISTS tidemill_job_{name}"
    editor.execute(f"CREATE {index} ON tidemill_job ({listed}){partial}")


def _drop(editor: Any, name: str) -> None:
    table = " ON tidemill_job" if editor.connection.vendor == "mysql" else ""
    editor.execute(f"DROP INDEX IF EXISTS tidemill_job_{name}{table}")


class Migration(migrations.Migration):
    dependencies = [("tidemill", "0001_tables")]

    operations = [migrations.RunPython(make_indexes, drop_indexes, atomic=False)]
