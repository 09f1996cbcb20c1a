"""The API is typed: mypy strict and pyright find nothing in ``api.py`` but its marked errors."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.everyday

ROOT = Path(__file__).parents[2]
API = Path(__file__).with_name("api.py")


def check(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr if done.returncode else ""


def test_mypy_sees_what_we_mean() -> None:
    importlib.import_module("mypy")  # missing is a failure, not a skip
    assert not check("mypy", "--strict", "--warn-unused-ignores", str(API))


def test_pyright_sees_what_we_mean(tmp_path: Path) -> None:
    importlib.import_module("pyright")  # missing is a failure, not a skip
    config = tmp_path / "pyrightconfig.json"
    config.write_text(
        f'{{"include": ["{API}"], "extraPaths": ["{ROOT / "src"}"], "pythonVersion": "3.11",'
        ' "typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error"}'
    )
    assert not check("pyright", "--project", str(config), "--pythonpath", sys.executable)


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "tidemill" / "py.typed").is_file()
