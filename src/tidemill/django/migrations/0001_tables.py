"""The tables of ``django://``, and the indexes that Django cannot describe for every database."""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from typing import Any

from django.db import migrations, models

_TABLES = (
    *("store", "job", "key", "queue", "owner", "schedule", "limit", "partition", "history"),
    "number",
)
_INDEXES = {
    "claim": ("state, queue, kind, rank, seq", "state <= 3"),
    "token": ("token", "token > 0"),
    "alarm": ("alarm", "alarm IS NOT NULL"),
    "prune": ("prune", "prune IS NOT NULL"),
    "limited": ("share, queue, rank, seq", "state = 2 AND share <> ''"),
}
_MARIADB = {"limited": "share, state, rank, seq"}
"""The columns of an index on MariaDB, which has no partial indexes, and short keys."""


def make_indexes(apps: Any, editor: Any) -> None:
    """Make the indexes, as partial indexes where possible; on MariaDB compare names by bytes."""
    vendor = editor.connection.vendor
    if vendor == "mysql":
        for table in _TABLES:
            editor.execute(
                f"ALTER TABLE tidemill_{table} CONVERT TO CHARACTER SET utf8mb4 "
                "COLLATE utf8mb4_nopad_bin"
            )
    for name, (columns, where) in _INDEXES.items():
        columns = _MARIADB.get(name, columns) if vendor == "mysql" else columns
        partial = "" if vendor == "mysql" else f" WHERE {where}"
        columns = ", ".join(editor.quote_name(c) for c in columns.split(", "))
        editor.execute(f"CREATE INDEX tidemill_job_{name} ON tidemill_job ({columns}){partial}")


class Migration(migrations.Migration):
    initial = True

    dependencies: list[tuple[str, str]] = []

    operations = [
        migrations.CreateModel(
            name="Job",
            fields=[
                ("seq", models.BigAutoField(primary_key=True, serialize=False)),
                ("id", models.CharField(max_length=255, unique=True)),
                ("queue", models.CharField(max_length=255)),
                ("kind", models.SmallIntegerField(default=0)),
                ("state", models.SmallIntegerField()),
                ("rank", models.BigIntegerField()),
                ("due", models.FloatField(default=0)),
                ("expires", models.FloatField(default=0)),
                ("alarm", models.FloatField(null=True)),
                ("prune", models.FloatField(null=True)),
                ("token", models.BigIntegerField(default=0)),
                ("holder", models.CharField(default="", max_length=255)),
                ("task", models.CharField(default="", max_length=255)),
                ("key", models.CharField(default="", max_length=255)),
                ("share", models.CharField(default="", max_length=600)),
                ("linked", models.SmallIntegerField(default=0)),
                ("fresh", models.SmallIntegerField(default=0)),
                ("finished", models.FloatField(default=0)),
                ("envelope", models.BinaryField(default=b"")),
                ("facts", models.BinaryField(default=b"")),
                ("large", models.BinaryField(default=b"")),
            ],
            options={"db_table": "tidemill_job"},
        ),
        migrations.CreateModel(
            name="Limit",
            fields=[
                ("name", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("facts", models.BinaryField()),
            ],
            options={"db_table": "tidemill_limit"},
        ),
        migrations.CreateModel(
            name="Number",
            fields=[("n", models.BigAutoField(primary_key=True, serialize=False))],
            options={"db_table": "tidemill_number"},
        ),
        migrations.CreateModel(
            name="Owner",
            fields=[
                ("id", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("until", models.FloatField()),
                ("serial", models.BigIntegerField(default=0)),
                ("facts", models.BinaryField()),
                ("commands", models.BinaryField(default=b"")),
                ("reply", models.BinaryField(default=b"")),
            ],
            options={"db_table": "tidemill_owner", "verbose_name": "worker"},
        ),
        migrations.CreateModel(
            name="Partition",
            fields=[
                ("share", models.CharField(max_length=600, primary_key=True, serialize=False)),
                ("running", models.BigIntegerField(default=0)),
                ("turn", models.BigIntegerField(default=0)),
                ("limiter", models.BinaryField(default=b"")),
            ],
            options={"db_table": "tidemill_partition"},
        ),
        migrations.CreateModel(
            name="Queue",
            fields=[
                ("name", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("paused", models.SmallIntegerField(default=0)),
                ("max_size", models.BigIntegerField(default=0)),
                ("accepted", models.BigIntegerField(default=0)),
                ("succeeded", models.BigIntegerField(default=0)),
                ("failed", models.BigIntegerField(default=0)),
                ("cancelled", models.BigIntegerField(default=0)),
                ("expired", models.BigIntegerField(default=0)),
                ("retried", models.BigIntegerField(default=0)),
                ("purged", models.BigIntegerField(default=0)),
            ],
            options={"db_table": "tidemill_queue"},
        ),
        migrations.CreateModel(
            name="Schedule",
            fields=[
                ("name", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("version", models.BigIntegerField()),
                ("due", models.FloatField(default=0)),
                ("claimed", models.FloatField(default=0)),
                ("body", models.BinaryField(default=b"")),
            ],
            options={"db_table": "tidemill_schedule"},
        ),
        migrations.CreateModel(
            name="Store",
            fields=[
                ("id", models.IntegerField(primary_key=True, serialize=False)),
                ("departs", models.SmallIntegerField(default=0)),
                ("facts", models.BinaryField(default=b"")),
            ],
            options={"db_table": "tidemill_store"},
        ),
        migrations.CreateModel(
            name="HistoryRow",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("kind", models.CharField(max_length=40)),
                ("span", models.IntegerField()),
                ("at", models.BigIntegerField()),
                ("name", models.CharField(max_length=600)),
                ("counts", models.BinaryField(default=b"")),
                ("sample", models.BinaryField(default=b"")),
            ],
            options={
                "db_table": "tidemill_history",
                "unique_together": {("kind", "span", "at", "name")},
            },
        ),
        migrations.CreateModel(
            name="Key",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("key", models.CharField(max_length=255)),
                ("place", models.SmallIntegerField()),
                ("job", models.CharField(max_length=255)),
                ("until", models.FloatField(default=0)),
            ],
            options={"db_table": "tidemill_key", "unique_together": {("key", "place")}},
        ),
        migrations.RunPython(make_indexes, migrations.RunPython.noop, atomic=False),
    ]
