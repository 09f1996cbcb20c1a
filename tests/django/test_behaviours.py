"""The tests of a Django project, run by ``manage.py test`` on the Django of this Python.

Django's settings hold for a whole process, so these tests run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SITE = Path(__file__).parent / "site"
MODULES = sorted(path.stem for path in (SITE / "behaviours").glob("[a-z]*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_the_behaviours_hold(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "manage.py", "test", f"behaviours.{module}", "--verbosity=1"]
    environment = {**os.environ, "SITE_DATA": str(tmp_path)}
    for name in ("DJANGO_SETTINGS_MODULE", "TIDEMILL_URL", "TIDEMILL_APP"):
        environment.pop(name, None)
    done = subprocess.run(
        command, cwd=SITE, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-20_000:]}"
    assert "\nOK\n" in done.stderr, done.stderr[-2_000:]  # no test is skipped, and there are some


def test_there_are_behaviours() -> None:
    assert "framework" in MODULES
