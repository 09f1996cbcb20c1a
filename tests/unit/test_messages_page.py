"""docs/reference/messages.md has each log line of level INFO and above, and each exception."""

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


def unlisted(lines: list[Logged]) -> Iterator[str]:
    for line in lines:
        if line.text is None:
            yield f"{line.place} the format is not constant, so nobody can look it up."
        elif not any(re.fullmatch(pattern(line.text), shown) for shown in SHOWN):
            yield f"{line.place} the page does not show the line {line.text!r}."


def with_several_levels(lines: list[Logged]) -> Iterator[str]:
    levels: dict[str, set[str]] = {}
    for line in lines:
        if line.text and PLACEHOLDER.sub("", line.text):  # not a text that is just an error
            levels.setdefault(line.text, set()).add(line.method)
    for line in lines:
        others = sorted(levels.get(line.text or "", set()) - {line.method})
        if others and line.text not in VARYING:
            yield f"{line.place} logs with {line.method} what others log with {', '.join(others)}."


def unlisted_loggers() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in re.findall(r'(?:getLogger|SafeLog)\("(tidemill[.a-z]*)"\)', line):
                if name not in SHOWN:
                    yield f"{path.relative_to(ROOT)}:{number} the page does not show {name}."


def unlisted_exceptions() -> Iterator[str]:
    headings = " ".join(re.findall(r"^### (.*)$", PAGE, re.MULTILINE))
    for name in tidemill.__all__:
        thing = getattr(tidemill, name)
        exception = isinstance(thing, type) and issubclass(thing, BaseException)
        if exception and name not in re.findall(r"\w+", headings):
            yield f"docs/reference/messages.md has no section for {name}."


def test_the_page_has_each_log_line_logger_and_exception() -> None:
    lines = list(logged())
    assert {line.room for line in lines} >= {"app", "brokers", "client", "server", "worker", "cli"}
    assert len({line.text for line in lines}) > 100
    expect_none(
        [
            *unlisted(lines),
            *with_several_levels(lines),
            *unlisted_loggers(),
            *unlisted_exceptions(),
        ]
    )


def test_the_levels_on_the_page_are_those_of_logging() -> None:
    levels = set(re.findall(r"^\| .* \| `([A-Z]+)` \| ", PAGE, re.MULTILINE))
    assert levels == {"INFO", "WARNING", "ERROR"}
    assert levels <= set(logging.getLevelNamesMapping())
