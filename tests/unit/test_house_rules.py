"""The house rules: imports run downward, and rooms, files, functions and classes stay small.

Each rule looks at every file, and lists all offenders. Imports at run time count wherever they
stand, also inside functions. Imports for type checking may run in any direction.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from offences import expect_none

import tidemill

ROOT = Path(tidemill.__file__).parent

# From the bottom up. A module may import from its own room and from the rooms before it.
# Rooms of one row do not know each other.
LAYERS: list[tuple[str, ...]] = [
    ("errors",),
    ("core",),
    ("limits",),
    ("brokers.contract",),
    ("brokers.registry",),
    ("brokers.network",),
    ("brokers.shared",),
    ("brokers.rules",),
    (
        *("brokers.memory", "brokers.lmdb", "brokers.redis", "brokers.postgres"),
        *("brokers.rabbitmq", "brokers.http", "brokers.django"),
    ),
    ("brokers.generic",),
    ("client",),
    ("workflows",),
    ("schedules", "transfer"),
    ("worker",),
    ("runtime",),
    ("app",),
    ("app_loader",),
    ("", "typing"),
    ("metrics", "otel", "alerts"),
    ("doctor",),
    ("dashboard",),
    ("server", "testing", "worker_main"),
    ("cli",),
    ("django",),
    ("demo",),
    ("__main__",),
]
CONCRETE = LAYERS[8]
NAMES_A_BROKER = {
    "runtime": "brokers.lmdb",  # opens a store in the caller's own environment
    "doctor": "brokers.lmdb",  # explains a store on disk
}

MOST_LINES = 900
MOST_FUNCTION_LINES = {".py": 60, ".lua": 60, ".sql": 80}
MOST_ARGUMENTS = 10
MOST_METHODS = 30

MOST_FILES = 25
MOST_FILES_WITH_SUBFOLDERS = {"brokers/lmdb": 35, "django": 25}
CROWDED_ROOMS = {"brokers/postgres/sql": 29, "brokers/redis/lua": 40}
"""The rooms that hold too many files. A number here may only fall, and rooms may only leave."""


class Import(NamedTuple):
    """An import of a module of ours, by its name without ``tidemill.``."""

    line: int
    module: str
    for_types: bool


class Function(NamedTuple):
    """A function in Python, Lua or SQL; only those in SQL count their arguments."""

    line: int
    name: str
    lines: int
    arguments: int = 0


class Source(NamedTuple):
    """What the rules ask about a file."""

    path: str
    kind: str
    lines: int
    functions: Sequence[Function]
    imports: Sequence[Import] = ()
    classes: Sequence[tuple[int, str, int]] = ()  # line, name and number of public methods
    docstring: bool = True

    @property
    def module(self) -> str:
        """``worker.supervisor``; the package itself has the empty name."""
        parts = self.path.removesuffix(".py").split("/")
        return ".".join(part for part in parts if part != "__init__")

    def at(self, line: int) -> str:
        return f"src/tidemill/{self.path}:{line}"


@functools.cache
def sources() -> list[Source]:
    """Every file of ours, read and parsed once."""
    read = {".py": read_python, ".lua": read_lua, ".sql": read_sql}
    paths = sorted(path for path in ROOT.rglob("*") if path.suffix in read)
    found = [read[path.suffix](str(path.relative_to(ROOT)), path.read_text()) for path in paths]
    for kind in read:
        assert sum(len(source.functions) for source in found if source.kind == kind) > 50
    return found


def modules() -> list[Source]:
    return [source for source in sources() if source.kind == ".py"]


def read_python(path: str, text: str) -> Source:
    tree = ast.parse(text)
    functions, imports, classes = [], [], []
    for node, for_types in statements(tree.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            functions.append(Function(node.lineno, node.name, lines))
        elif isinstance(node, ast.ClassDef):
            classes.append((node.lineno, node.name, public_methods(node)))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imports += [Import(node.lineno, name, for_types) for name in imported(node)]
    docstring = ast.get_docstring(tree) is not None
    return Source(path, ".py", text.count("\n"), functions, imports, classes, docstring)


def statements(body: list[ast.stmt], for_types: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Each statement at any depth, and whether only type checkers read it."""
    for node in body:
        yield node, for_types
        test = getattr(node, "test", None)
        guard = "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))
        yield from statements(getattr(node, "body", []), for_types or guard)
        for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            yield from statements(part.body, for_types)
        yield from statements(getattr(node, "orelse", []), for_types)
        yield from statements(getattr(node, "finalbody", []), for_types)


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules of ours that a statement imports; a relative import has a leading dot."""
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif node.level:
        return ["." * node.level + (node.module or "")]
    else:
        base = node.module or ""
        parts = [f"{base}.{alias.name}" for alias in node.names]
        found = [part if is_module(part) else base for part in parts]
    ours = [name for name in dict.fromkeys(found) if name.split(".")[0] == "tidemill"]
    return [name.removeprefix("tidemill").lstrip(".") for name in ours]


@functools.cache
def is_module(name: str) -> bool:
    path = ROOT.parent / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


_PROPERTIES = frozenset({"property", "functools.cached_property"})


def public_methods(node: ast.ClassDef) -> int:
    """The number of names of methods without an underscore; a property is no method."""
    methods = [
        part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    names = {
        method.name
        for method in methods
        if _PROPERTIES.isdisjoint(map(ast.unparse, method.decorator_list))
    }
    return sum(not name.startswith("_") for name in names)


def read_lua(path: str, text: str) -> Source:
    whole = re.compile(r"^(?:local )?function ([\w.]+).*?^end$", re.MULTILINE | re.DOTALL)
    functions = [
        Function(line_at(text, found.start()), found[1], found[0].count("\n") + 1)
        for found in whole.finditer(text)
    ]
    code = [line for line in whole.sub("", text).splitlines() if re.match(r"\s*[^\s-]", line)]
    functions.append(Function(1, "outside functions", len(code)))
    return Source(path, ".lua", text.count("\n"), functions)


def read_sql(path: str, text: str) -> Source:
    whole = re.compile(
        r"^CREATE (?:OR REPLACE )?(?:FUNCTION|PROCEDURE) ([\w.]+)"
        r"(.*?)\b(?:RETURNS|LANGUAGE|AS)\b.*?\$(\w*)\$.*?\$\3\$",
        re.MULTILINE | re.DOTALL,
    )
    functions = [
        Function(
            line_at(text, found.start()),
            name=found[1],
            lines=found[0].count("\n") + 1,
            arguments=found[2].count(",") + 1,
        )
        for found in whole.finditer(text)
    ]
    return Source(path, ".sql", text.count("\n"), functions)


def line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def room_of(module: str) -> tuple[int, str]:
    """The height of a module's room, and the room; a module without a room is the highest."""
    if module == "brokers":  # an empty package
        return 0, "brokers"
    for height, rooms in enumerate(LAYERS):
        for room in rooms:
            if module == room or (room and module.startswith(f"{room}.")):
                return height, room
    return len(LAYERS), "no room"


def test_imports_run_downward_and_in_no_circle() -> None:
    expect_none([*upward_imports(), *circles()])


def upward_imports() -> Iterator[str]:
    for source in modules():
        height, room = room_of(source.module)
        if room == "no room":
            yield f"{source.at(1)} stands in no room. Add its room to LAYERS."
        for line, module, for_types in source.imports:
            theirs, other = room_of(module)
            if module.startswith("."):
                yield f"{source.at(line)} imports {module!r}. Write the module's whole name."
            elif not for_types and theirs >= height and other != room:
                yield f"{source.at(line)} imports {module}, which stands in no lower room."


def circles() -> Iterator[str]:
    """The imports that lead back to their module."""
    below = {
        source.module: {each.module for each in source.imports if not each.for_types}
        for source in modules()
    }
    left = set(below)
    size = 0
    while size != len(left):  # without those that import, or are imported by, none of the rest
        size = len(left)
        left = {name for name in left if below[name] & left - {name}}
        left &= {other for name in left for other in below[name] - {name}}
    for source in modules():
        for line, module, for_types in source.imports:
            if source.module in left and module in left - {source.module} and not for_types:
                yield f"{source.at(line)} imports {module}, and so itself, in a circle."


def test_brokers_are_named_only_where_they_are_made() -> None:
    expect_none(
        f"{source.at(line)} names the broker {module}. Call it through brokers.contract."
        for source in modules()
        for line, module, _ in source.imports
        if (broker := room_of(module)[1]) in CONCRETE
        and broker not in ((room := room_of(source.module)[1]), NAMES_A_BROKER.get(room))
    )


def test_the_import_of_an_app_loads_no_driver_and_no_event_loop() -> None:
    code = (
        "import sys; from tidemill import Tidemill\n"
        "print([name for name in sys.modules if name in ('asyncio', 'socket', 'pickle', 'zoneinfo')"
        " or 'lmdb' in name or 'brokers.memory' in name])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_module_says_what_lives_in_it() -> None:
    expect_none(
        f"{source.at(1)} has no docstring. Say what lives in the module."
        for source in modules()
        if not source.docstring
    )


def test_files_functions_and_classes_are_small() -> None:
    expect_none(
        offence
        for source in sources()
        if "migrations" not in source.path.split("/")
        for offence in too_large(source)
    )


def too_large(source: Source) -> Iterator[str]:
    if source.lines > MOST_LINES:
        yield f"{source.at(1)} has {source.lines} lines. A file has at most {MOST_LINES}."
    for line, name, lines, arguments in source.functions:
        if lines > (most := MOST_FUNCTION_LINES[source.kind]):
            yield f"{source.at(line)} {name} has {lines} lines. A function has at most {most}."
        if arguments > MOST_ARGUMENTS:
            yield f"{source.at(line)} {name} has {arguments} arguments, not {MOST_ARGUMENTS}."
    for line, name, methods in source.classes:
        if methods > MOST_METHODS:
            yield (
                f"{source.at(line)} {name} has {methods} public methods. "
                f"A class has at most {MOST_METHODS}."
            )


def test_a_room_holds_few_files() -> None:
    expect_none(crowds())


def crowds() -> Iterator[str]:
    """A room is a folder; some rooms count the files of their subfolders too."""
    files: Counter[str] = Counter()
    for source in sources():
        folder = source.path.rpartition("/")[0]
        if "migrations" not in folder.split("/"):
            files[folder] += 1
            for room in MOST_FILES_WITH_SUBFOLDERS:
                files[room] += folder.startswith(f"{room}/")
    for room in sorted(files.keys() | CROWDED_ROOMS.keys()):
        count, most = files[room], MOST_FILES_WITH_SUBFOLDERS.get(room, MOST_FILES)
        frozen = CROWDED_ROOMS.get(room)
        if frozen is None and count > most:
            yield f"{room}/ holds {count} files. A room holds at most {most}: put ideas together."
        elif frozen is not None and count > frozen:
            yield f"{room}/ holds {count} files, and may hold {frozen}: put ideas together."
        elif frozen is not None and count <= most:
            yield f"{room}/ holds only {count} files. Remove the room from CROWDED_ROOMS."
