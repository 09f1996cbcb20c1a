"""``tidemill server`` beside packages that are too old: one sentence, and no traceback."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from tidemill.cli import main
from tidemill.cli.server import OLDEST

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_an_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.21.1" if name == "uvicorn" else version(name)
    )
    result = CliRunner().invoke(main, ["server", "memory://"])
    assert result.exit_code == 2
    assert "the server needs uvicorn 0.30 or later, and 0.21.1 is installed" in result.output


def test_the_oldest_versions_are_those_of_the_extra() -> None:
    extra = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["server"]
    for name, oldest in OLDEST.items():
        assert f"{name}>={'.'.join(map(str, oldest))}" in extra
