"""docs/reference/messages.md has each log line of level INFO and above, and each exception."""

from __future__ import annotations

import ast
import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidemill

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PAGE = (ROOT / "docs" / "reference" / "messages.md").read_text()
SHOWN = [text for line in PAGE.splitlines() for text in re.findall(r"`([^`]+)`", line)]
METHODS = {"info", "warning", "error", "exception", "critical", "log", "failure"}
WRAPPER = SOURCE / "tidemill" / "worker" / "safe_logging.py"  # it passes on the lines of others
PLACEHOLDER = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[sdrfg]")


VARYING = {
    "%s at the beanstalk port: %s": "the level is that of the error",
    "%s; trying again": "a worker waits for its store; a server has other work",
}
"""Lines that have several levels, and why."""


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


def text_of(node: ast.expr, module: str) -> str:
    """The format of a line: a literal, or a constant of the module."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    assert isinstance(node, ast.Name), f"{module}: the format {ast.unparse(node)} is not constant"
    constant: str = getattr(importlib.import_module(module), node.id)
    return constant


def formats() -> Iterator[tuple[str, str, str]]:
    """The module, the format and the method of each line that is logged at INFO or above."""
    for path in sorted(SOURCE.rglob("*.py")):
        if path == WRAPPER:
            continue
        tree = ast.parse(path.read_text())
        names = loggers(tree)
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if ast.unparse(node.func.value) in names and node.func.attr in METHODS:
                place = 1 if node.func.attr in ("log", "failure") else 0
                yield module, text_of(node.args[place], module), node.func.attr


def pattern(text: str) -> str:
    """A pattern for the format as the page shows it: each placeholder may be any text."""
    return ".*".join(re.escape(part) for part in PLACEHOLDER.split(text))


LINES = sorted(set(formats()))
FORMATS = sorted({(module, text) for module, text, _ in LINES})


def test_the_lines_of_all_rooms_are_found() -> None:
    rooms = {module.split(".")[1] for module, _ in FORMATS}
    assert rooms >= {"app", "brokers", "client", "server", "worker", "cli"}
    assert len(FORMATS) > 100


def test_a_line_has_one_level_wherever_it_is_logged() -> None:
    levels: dict[str, set[str]] = {}
    for _, text, method in LINES:
        if PLACEHOLDER.sub("", text) and text not in VARYING:  # not a text that is just an error
            levels.setdefault(text, set()).add(method)
    assert {text: found for text, found in levels.items() if len(found) > 1} == {}


@pytest.mark.parametrize(("module", "text"), FORMATS)
def test_each_log_line_is_on_the_page(module: str, text: str) -> None:
    assert any(re.fullmatch(pattern(text), shown) for shown in SHOWN)


def test_each_logger_is_on_the_page() -> None:
    named = {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r'(?:getLogger|SafeLog)\("(tidemill[.a-z]*)"\)', path.read_text())
    }
    assert named <= set(SHOWN)


@pytest.mark.parametrize("name", tidemill.__all__)
def test_each_exception_has_a_section(name: str) -> None:
    thing = getattr(tidemill, name)
    if isinstance(thing, type) and issubclass(thing, BaseException):
        headings = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
        assert name in re.findall(r"\w+", " ".join(headings))


def test_the_levels_on_the_page_are_those_of_logging() -> None:
    levels = set(re.findall(r"^\| .* \| `([A-Z]+)` \| ", PAGE, re.MULTILINE))
    assert levels == {"INFO", "WARNING", "ERROR"}
    assert levels <= set(logging.getLevelNamesMapping())
