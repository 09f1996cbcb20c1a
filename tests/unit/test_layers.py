"""The house rules: imports run downward, there are no circles, and every room has a bounded size.

Imports count wherever they stand: at the top of a module, inside functions, and for type checking.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidemill

ROOT = Path(tidemill.__file__).parent

# From the bottom up. A module may import from its own room and from the rooms before it.
# Rooms of one row do not know each other.
LAYERS: list[tuple[str, ...]] = [
    ("core",),
    ("limits",),
    ("brokers.contract",),
    ("brokers.registry",),
    ("brokers.shared",),
    ("brokers.network",),
    ("brokers.carrier",),
    (
        *("brokers.memory", "brokers.lmdb", "brokers.redis", "brokers.postgres"),
        *("brokers.rabbitmq", "brokers.http"),
    ),
    ("brokers.django",),
    ("client",),
    ("workflows",),
    ("schedules", "transfer"),
    ("worker",),
    ("app",),
    ("app_loader",),
    ("",),
    ("metrics", "otel", "alerts"),
    ("dashboard",),
    ("server", "testing", "worker_main"),
    ("cli",),
    ("django",),
    ("demo",),
    ("__main__",),
]
CONCRETE = LAYERS[7] + LAYERS[8]
NAMES_A_BROKER = {
    "brokers.django": "brokers.memory",  # applies the rules of memory:// to rows
    "app": "brokers.lmdb",  # opens a store in the caller's own environment
    "cli": "brokers.lmdb",  # the doctor explains a store on disk
}
MOST_LINES = {".py": 450, ".lua": 400, ".sql": 400}
MOST_FUNCTION_LINES = 50
MOST_PROCEDURE_LINES = 80
MOST_ARGUMENTS = 10
MOST_METHODS = 30
FACADE = "app.py:Tidemill"


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    """``worker.supervisor`` of a file; the package itself has the empty name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and name of every module of ours that a module imports, anywhere in its text."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            base = node.module or ""
            parts = [f"{base}.{alias.name}" for alias in node.names]
            found = [part if is_module(part) else base for part in parts]
        for module in dict.fromkeys(found):
            if module.split(".")[0] == "tidemill":
                yield getattr(node, "lineno", 0), module.removeprefix("tidemill").lstrip(".")


def is_module(module: str) -> bool:
    path = ROOT.parent / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def layer_of(module: str) -> tuple[int, str]:
    """The height of a module's room, and the room."""
    if module == "brokers":  # an empty package
        return 0, "brokers"
    for height, rooms in enumerate(LAYERS):
        for room in rooms:
            if module == room or (room and module.startswith(f"{room}.")):
                return height, room
    raise AssertionError(f"{module} stands in no room")


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_run_downward(path: Path) -> None:
    height, room = layer_of(name_of(path))
    for line, module in imports(path):
        theirs, other = layer_of(module)
        assert theirs < height or other == room, f"{path}:{line} must not import {module}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        name_of(path): {module for _, module in imports(path)} - {name_of(path)}
        for path in modules()
    }
    while leaves := {name for name, below in graph.items() if not below & graph.keys()}:
        graph = {name: below for name, below in graph.items() if name not in leaves}
    circle = {name: sorted(below & graph.keys()) for name, below in graph.items()}
    assert not circle


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_brokers_are_named_only_where_they_are_made(path: Path) -> None:
    room = layer_of(name_of(path))[1]
    for line, module in imports(path):
        broker = layer_of(module)[1]
        if broker in CONCRETE:
            assert broker in (room, NAMES_A_BROKER.get(room)), f"{path}:{line} imports {module}"


def test_a_driver_is_loaded_only_when_its_url_is_opened() -> None:
    code = (
        "import sys, tidemill; print([m for m in sys.modules if 'lmdb' in m or 'brokers.m' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_every_module_says_what_lives_in_it(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("kind", MOST_LINES)
def test_no_file_is_longer_than_a_room(kind: str) -> None:
    lines = {
        str(path.relative_to(ROOT)): path.read_text().count("\n")
        for path in ROOT.rglob(f"*{kind}")
        if "migrations" not in path.parts
    }
    assert lines
    assert {path: count for path, count in lines.items() if count > MOST_LINES[kind]} == {}


def functions(kind: str) -> Iterator[tuple[str, str]]:
    """Name and text of every function of ours in Python, Lua or SQL."""
    for path in sorted(ROOT.rglob(f"*{kind}")):
        where, text = path.relative_to(ROOT), path.read_text()
        if "migrations" in path.parts:
            continue
        if kind == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{where}:{node.name}", ast.get_source_segment(text, node) or ""
        elif kind == ".lua":
            for found in re.finditer(r"^(?:local )?function ([\w.]+).*?^end$", text, re.M | re.S):
                yield f"{where}:{found[1]}", found[0]
            rest = re.sub(r"^(?:local )?function .*?^end$", "", text, flags=re.M | re.S)
            code = [line for line in rest.splitlines() if re.match(r"\s*[^\s-]", line)]
            yield f"{where}:outside functions", "\n".join(code)
        else:
            for found in re.finditer(
                r"^CREATE (?:OR REPLACE )?(?:FUNCTION|PROCEDURE) ([\w.]+).*?\$(\w*)\$.*?\$\2\$",
                text,
                re.M | re.S,
            ):
                yield f"{where}:{found[1]}", found[0]


@pytest.mark.parametrize("kind", [".py", ".lua", ".sql"])
def test_a_function_fits_on_a_screen(kind: str) -> None:
    most = MOST_PROCEDURE_LINES if kind == ".sql" else MOST_FUNCTION_LINES
    found = {name: text.count("\n") + 1 for name, text in functions(kind)}
    assert len(found) > 50
    assert {name: lines for name, lines in found.items() if lines > most} == {}


def test_a_procedure_takes_few_arguments() -> None:
    found = {}
    for name, text in functions(".sql"):
        head = text[: re.search(r"\b(?:RETURNS|LANGUAGE|AS)\b", text).start()]  # type: ignore[union-attr]
        found[name] = head.count(",") + 1
    assert len(found) > 50
    assert {name: count for name, count in found.items() if count > MOST_ARGUMENTS} == {}


def test_a_class_has_few_public_methods() -> None:
    found = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[f"{path.relative_to(ROOT)}:{node.name}"] = len(public_methods(node))
    assert found.pop(FACADE) > 20
    assert {name: count for name, count in found.items() if count > MOST_METHODS} == {}


def public_methods(node: ast.ClassDef) -> list[str]:
    """The methods of a class without an underscore; a property is no method."""
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        method.name
        for method in methods
        if not method.name.startswith("_")
        and not any(isinstance(d, ast.Name) and d.id == "property" for d in method.decorator_list)
    ]
