"""docs/reference/api.md has each public name, and no name that does not exist."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import tidemill
from tidemill import testing
from tidemill.core import errors

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
DIRECTIVES = re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)
BETWEEN_ROOMS = {  # methods of the app that other rooms of tidemill call
    *("after_fork_child", "before_close", "broker", "current_batch", "envelope", "in_batch"),
    *("batch_for", "commit_batch", "job_store", "threaded_put"),
    *("find_task", "may_import", "patiently", "put", "seal", "threaded"),
}


def found(path: str) -> object:
    """The object at a dotted path."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            target: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for name in parts[split:]:
            target = getattr(target, name)
        return target
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize("path", DIRECTIVES)
def test_a_directive_names_something_that_exists(path: str) -> None:
    assert found(path) is not None


def test_each_directive_stands_once() -> None:
    assert sorted(set(DIRECTIVES)) == sorted(DIRECTIVES)


@pytest.mark.parametrize("name", tidemill.__all__)
def test_each_public_name_is_on_the_page(name: str) -> None:
    assert f"tidemill.{name}" in DIRECTIVES


@pytest.mark.parametrize("name", testing.__all__)
def test_each_helper_for_tests_is_on_the_page(name: str) -> None:
    assert f"tidemill.testing.{name}" in DIRECTIVES


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_is_on_the_page(name: str) -> None:
    assert f"tidemill.{name}" in DIRECTIVES


def test_each_method_of_the_app_is_on_the_page() -> None:
    # given the methods and properties that users may call
    members = [name for name, _ in inspect.getmembers(tidemill.Tidemill) if name[0] != "_"]
    shown = re.findall(r"::: tidemill\.Tidemill\n    options:\n      members: \[(.*)\]", PAGE)[0]
    # when they are looked up, then each has a directive, or is in the list of the class
    for name in set(members) - BETWEEN_ROOMS:
        assert f"tidemill.Tidemill.{name}" in DIRECTIVES or name in shown.split(", ")


@pytest.mark.parametrize("path", DIRECTIVES)
def test_each_thing_on_the_page_has_a_docstring(path: str) -> None:
    target = found(path)
    # A type alias and a fixture of pytest have no docstring of their own at run time.
    if inspect.isclass(target) or inspect.isfunction(target):
        assert inspect.getdoc(target)
