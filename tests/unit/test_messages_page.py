"""docs/reference/messages.md shows log lines that exist, with their levels, and each exception."""

from __future__ import annotations

import ast
import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from offences import expect_none

import tidemill
from tidemill import errors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGE = (ROOT / "docs" / "reference" / "messages.md").read_text()
ROWS = re.findall(r"^\| (`.*?) \| `([A-Z]+)` \| .+ \|$", PAGE, re.MULTILINE)
"""The first cell of each row, and its level."""

METHODS = {"info", "warning", "error", "exception", "critical", "log", "failure"}
WRAPPER = SOURCE / "tidemill" / "worker" / "safe_logging.py"  # it passes on the lines of others
PLACEHOLDER = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[sdrfg]")


LEVELS = {"info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR"}
"""The levels of the methods; ``log`` and ``failure`` get their level as an argument."""


class Logged(NamedTuple):
    """A call that logs a line at INFO or above."""

    place: str
    room: str
    text: str | None
    method: str


def loggers(tree: ast.Module) -> set[str]:
    """The module's names for loggers."""
    made = ("logging.getLogger", "SafeLog")
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name) and ast.unparse(node.value.func) in made
    }


def text_of(node: ast.expr, module: str) -> str | None:
    """The format of a line, if it is a literal or a constant of the module."""
    if isinstance(node, ast.Name):
        text = getattr(importlib.import_module(module), node.id, None)
    else:
        text = getattr(node, "value", None)
    return text if isinstance(text, str) else None


def logged() -> Iterator[Logged]:
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text()
        if path == WRAPPER or not re.search("getLogger|SafeLog", source):
            continue
        tree = ast.parse(source)
        names = loggers(tree)
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            method = node.func.attr
            if method in METHODS and ast.unparse(node.func.value) in names:
                text = text_of(node.args[method in ("log", "failure")], module)
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield Logged(place, module.split(".")[1], text, method)


def pattern(text: str) -> str:
    """A pattern for the format as the page shows it: each placeholder may be any text."""
    return ".*".join(re.escape(part) for part in PLACEHOLDER.split(text))


def not_logged(lines: list[Logged]) -> Iterator[str]:
    for cell, level in ROWS:
        shown = re.findall(r"`([^`]+)`", cell)[0]
        found = [line for line in lines if line.text and re.fullmatch(pattern(line.text), shown)]
        if not found:
            yield f"no code logs the line {shown!r}."
        elif level not in {LEVELS.get(line.method, level) for line in found}:
            yield f"{found[0].place} does not log with {level} as the page says."


def unlisted_exceptions() -> Iterator[str]:
    rows = re.findall(
        r"^\| `(\w+)`[^|]* \| .+ \|$", PAGE.partition("## Exceptions")[2], re.MULTILINE
    )
    public = {
        name: getattr(module, name) for module in (tidemill, errors) for name in module.__all__
    }
    for name, thing in public.items():
        exception = isinstance(thing, type) and issubclass(thing, BaseException)
        if exception and name not in rows:
            yield f"docs/reference/messages.md has no row for {name}."


def test_the_page_shows_lines_that_are_logged_and_all_exceptions() -> None:
    lines = [line for line in logged() if line.text and PLACEHOLDER.sub("", line.text).strip()]
    assert {line.room for line in lines} >= {"brokers", "client", "runtime", "server", "worker"}
    assert len(ROWS) > 30
    expect_none([*not_logged(lines), *unlisted_exceptions()])


def test_the_levels_on_the_page_are_those_of_logging() -> None:
    assert {level for _, level in ROWS} == {"WARNING", "ERROR"} < {*logging.getLevelNamesMapping()}
