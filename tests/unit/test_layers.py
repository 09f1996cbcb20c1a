"""Imports run downward only: what lies below knows nothing of what is built on it."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidemill

ROOT = Path(tidemill.__file__).parent

# From the bottom up. A module may import from its own layer and from those before it.
LAYERS: list[tuple[str, ...]] = [
    (
        *("attempt", "errors", "clock", "shield", "deferral", "board", "crash", "elsewhere"),
        *("files", "gathering", "locks", "stopping"),
    ),
    ("retry", "gate", "owner"),
    ("job",),
    ("codec", "config", "trust"),
    ("brokers",),
    (
        *("app", "arguments", "bar", "batch", "completed", "compose", "consumers", "context"),
        *("deletion", "drain", "enqueuing", "features", "finding", "gathered", "groups", "handle"),
        "hooks",
        *("inline", "inputs", "limits", "loader", "middleware", "move", "moved", "openings"),
        *("options", "plan", "pour", "queue", "schedules", "task", "threads", "trail"),
        *("undelivered", "wholes"),
    ),
    ("worker", "server"),
    ("cli", "demo", "testing", "__main__"),
]
CONCRETE = ("memory", "lmdb", "redis", "postgres", "rabbitmq", "http")
MOST_LINES = 450


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """``tidemill.worker.hand`` of a file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and module of every import of ours, those inside functions too, but not for typing."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    tree = ast.parse(path.read_text())
    for_typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_typing:
            continue
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            found = [node.module or ""]
            if node.module == "tidemill":
                found = [f"tidemill.{alias.name}" for alias in node.names]
        for module in found:
            if module.split(".")[0] == "tidemill":
                yield getattr(node, "lineno", 0), module


def layer_of(module: str) -> int:
    part = module.split(".")[1]
    return next(index for index, layer in enumerate(LAYERS) if part in layer)


def is_module(module: str) -> bool:
    path = ROOT.parent / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_run_downward(path: Path) -> None:
    name = name_of(path)
    if name == "tidemill":
        return
    mine = layer_of(name)
    for line, module in imports(path):
        if is_module(module) and module != "tidemill":
            assert layer_of(module) <= mine, f"{path}:{line}: {name} must not import {module}"


def test_every_module_has_its_layer() -> None:
    parts = {name_of(path).split(".")[1] for path in modules() if name_of(path) != "tidemill"}
    assert parts == {part for layer in LAYERS for part in layer}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_brokers_are_named_only_where_they_are_made(path: Path) -> None:
    name = name_of(path).split(".")
    mine = name[2] if name[1:2] == ["brokers"] and len(name) > 2 else ""
    # The app puts one in the caller's own environment; the doctor explains a store on disk.
    allowed = {mine} | ({"lmdb"} if name[1:2] in (["app"], ["cli"]) else set())
    for line, module in imports(path):
        parts = module.split(".")
        if parts[1:2] == ["brokers"] and parts[2:3] and parts[2] in CONCRETE:
            assert parts[2] in allowed, f"{path}:{line} names the broker {module}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_worker_and_server_know_nothing_of_each_other(path: Path) -> None:
    mine, apart = name_of(path).split(".")[1:2], {"worker", "server"}
    if apart.isdisjoint(mine):
        return
    for line, module in imports(path):
        other = module.split(".")[1:2]
        assert other == mine or apart.isdisjoint(other), f"{path}:{line} imports {module}"


def test_a_driver_is_loaded_only_when_its_url_is_opened() -> None:
    code = (
        "import sys, tidemill; print([m for m in sys.modules if 'lmdb' in m or 'brokers.m' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_is_a_room(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MOST_LINES
    assert ast.get_docstring(ast.parse(text)), "every module says what lives in it"
