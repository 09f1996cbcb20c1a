"""docs/reference/api.md has each public name, and no name that does not exist."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from offences import expect_none

import tidemill
from tidemill import errors, testing, typing

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "api.md").read_text()
DIRECTIVES = {
    found[1]: f"docs/reference/api.md:{number}"
    for number, line in enumerate(PAGE.splitlines(), 1)
    if (found := re.match(r"::: (\S+)$", line))
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


def wrong_directives() -> Iterator[str]:
    for path, place in DIRECTIVES.items():
        try:
            target = found(path)
        except (AttributeError, ModuleNotFoundError):
            target = None
        # A type alias and a fixture of pytest have no docstring of their own at run time.
        if target is None:
            yield f"{place} names {path}, which does not exist."
        elif (inspect.isclass(target) or inspect.isfunction(target)) and not inspect.getdoc(target):
            yield f"{place} names {path}, which has no docstring."
    for path, times in Counter(re.findall(r"^::: (\S+)$", PAGE, re.MULTILINE)).items():
        if times > 1:
            yield f"{DIRECTIVES[path]} names {path} {times} times."


def unlisted_names() -> Iterator[str]:
    public = {f"tidemill.{name}" for name in tidemill.__all__}
    public |= {f"tidemill.errors.{name}" for name in {*errors.__all__} - {*tidemill.__all__}}
    public |= {f"tidemill.testing.{name}" for name in testing.__all__}
    public |= {f"tidemill.typing.{name}" for name in typing.__all__}
    for name in sorted(public - DIRECTIVES.keys()):
        yield f"docs/reference/api.md has no directive for {name}."


def unlisted_methods() -> Iterator[str]:
    """The methods and properties of the app without a directive, and outside the class's list."""
    members = {name for name, _ in inspect.getmembers(tidemill.Tidemill) if name[0] != "_"}
    shown = re.findall(r"::: tidemill\.Tidemill\n    options:\n      members: \[(.*)\]", PAGE)[0]
    for name in sorted(members - {*shown.split(", ")}):
        if f"tidemill.Tidemill.{name}" not in DIRECTIVES:
            yield f"docs/reference/api.md has no directive for Tidemill.{name}."


def test_the_page_has_each_public_name_once_and_no_other() -> None:
    assert len(DIRECTIVES) > 100
    expect_none([*wrong_directives(), *unlisted_names(), *unlisted_methods()])
