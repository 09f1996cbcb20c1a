"""The setting ``TIDEMILL`` while Django's settings module is imported."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from django.conf import ENVIRONMENT_VARIABLE
from django.core.exceptions import ImproperlyConfigured

TASKS = "from tidemill.django.settings import read_settings\nurl = read_settings().url\n"
SETTING = 'TIDEMILL = {"URL": "memory://"}\n'


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a settings module that imports the module ``TASKS`` above ``TIDEMILL``."""
    name = f"settings_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}_tasks.py").write_text(TASKS)
    (tmp_path / f"{name}.py").write_text(f"import {name}_tasks\n{SETTING}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, name)
    return name


def test_tasks_that_are_imported_above_the_setting_are_refused(module: str) -> None:
    # case M15: the setting had no effect, without a word
    with pytest.raises(ImproperlyConfigured, match=f"{module} imports tasks before it sets TIDE"):
        importlib.import_module(module)


def test_tasks_that_are_imported_below_the_setting_are_accepted(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case M15
    (tmp_path / f"{module}.py").write_text(f"{SETTING}import {module}_tasks as tasks\n")
    given = type("Given", (), {"TIDEMILL": {"URL": "memory://"}})
    monkeypatch.setattr("tidemill.django.settings.settings", given)
    assert importlib.import_module(module).tasks.url == "memory://"
