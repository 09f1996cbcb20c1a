"""A migration of a project that came from django-q makes schedules, as the guide says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = """
SECRET_KEY, USE_TZ, Q_CLUSTER = "x", True, {}
INSTALLED_APPS = ["tidemill.django", "blog"]
TIDEMILL = {"URL": "%s"}
_options = {"transaction_mode": "IMMEDIATE"}
_database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3", "OPTIONS": _options}
DATABASES = {"default": _database}
"""

MIGRATION = """
from django.db import migrations
from tidemill.django.q import Schedule

def make(apps, schema_editor):
    Schedule.objects.get_or_create(func="math.floor", args="1", schedule_type="D", name="floor")

class Migration(migrations.Migration):
    atomic = False
    dependencies = [("tidemill", "0001_tables")]
    operations = [migrations.RunPython(make)]
"""


@pytest.mark.parametrize("url", ["django://default", "lmdb://./jobs"])
def test_a_new_database_gets_the_schedules_of_old_migrations(url: str, tmp_path: Path) -> None:
    folder = tmp_path / "blog" / "migrations"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder / "__init__.py"):
        path.touch()
    (folder / "0001_schedules.py").write_text(MIGRATION)
    (tmp_path / "blog_settings.py").write_text(SETTINGS % url)
    own = {"DJANGO_SETTINGS_MODULE": "blog_settings", "PYTHONPATH": str(tmp_path)}
    for command in ("migrate", "tidemill schedule list"):
        done = subprocess.run(
            [sys.executable, "-m", "django", *command.split()],
            cwd=tmp_path,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "floor" in done.stdout
