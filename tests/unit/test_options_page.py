"""docs/reference/options.md has every option and every environment variable."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import msgspec
from offences import expect_none

from tidemill import Key, Limit, Retries, Tidemill
from tidemill.brokers.http import address as http
from tidemill.brokers.lmdb import open as lmdb
from tidemill.brokers.postgres import settings as postgres
from tidemill.brokers.rabbitmq import settings as rabbitmq
from tidemill.brokers.redis import settings as redis
from tidemill.cli.server import server
from tidemill.cli.worker import worker
from tidemill.client.options import CALL_OPTIONS, PUBLISH_OPTIONS, PUT_OPTIONS, TASK_OPTIONS
from tidemill.limits.declare import QueueSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "options.md").read_text()


def section(title: str) -> str:
    """A section of the page, by its heading."""
    return re.split(r"^## ", PAGE, flags=re.MULTILINE)[
        1 + re.findall(r"^## (.*)$", PAGE, re.MULTILINE).index(title)
    ]


def named(text: str) -> dict[str, str]:
    """The names in the first column of a section's tables, with the second column."""
    rows = re.findall(r"^\| ([^|]*) \| ([^|]*) \|", text, re.MULTILINE)
    return {name: where for names, where in rows for name in re.findall(r"`([^`]+)`", names)}


def of_command(command: click.Command) -> set[str]:
    shown = [option for option in command.params if isinstance(option, click.Option)]
    return {max(option.opts, key=len) for option in shown if not option.hidden}


PLACES = {
    "task": TASK_OPTIONS,
    "call": CALL_OPTIONS,
    "put": PUT_OPTIONS,
    "publish": PUBLISH_OPTIONS,
}
SECTIONS: list[tuple[str, Iterable[str]]] = [
    ("Tasks, calls and messages", Retries.__struct_fields__),
    ("Tasks, calls and messages", {f.name for f in dataclasses.fields(Key)}),
    ("Tasks, calls and messages", {f.name for f in dataclasses.fields(Limit) if f.init}),
    ("Tasks, calls and messages", QueueSettings.__annotations__),
    ("The app", set(inspect.signature(Tidemill).parameters) - {"defaults"}),
    ("Worker", of_command(worker)),
    ("Job server", of_command(server)),
    ("URLs of stores", lmdb._OPTIONS),
    ("URLs of stores", redis._OPTIONS),
    ("URLs of stores", postgres._OURS),
    ("URLs of stores", rabbitmq._OPTIONS),
    ("URLs of stores", http._OPTIONS),
]


def wrong_places() -> Iterator[str]:
    """The options of tasks, calls and messages that the page places wrongly."""
    rows = named(section("Tasks, calls and messages").partition("| option of `Retries`")[0])
    for where, names in PLACES.items():
        told = {name for name, places in rows.items() if where in places.split(", ")}
        for name in sorted((told - {"name", "schedule"}) ^ {*names}):
            wrong = "is no option" if name in told else "is an option"
            yield f"{place(f'`{name}`')} {name} {wrong} of a {where}, and the page says otherwise."


def unlisted_options() -> Iterator[str]:
    for title, names in SECTIONS:
        for name in sorted({*names} - {*named(section(title))}):
            yield f"{place(title)} the section {title!r} has no row for {name}."


def wrong_variables() -> Iterator[str]:
    read = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        text = path.read_text()
        for found in re.finditer(r"TIDEMILL_[A-Z_]+\b(?!\{)", text):
            line = text.count("\n", 0, found.start()) + 1
            read.setdefault(found[0], f"{path.relative_to(ROOT)}:{line}")
    assert len(read) >= 8
    told = {*named(section("Environment variables"))}
    for name in sorted(read.keys() - told):
        yield f"{read[name]} reads {name}, which the page does not show."
    for name in sorted(told - read.keys()):
        yield f"{place(f'`{name}`')} no module reads {name}."


def place(text: str) -> str:
    """The first line of the page with a text."""
    before, found, _ = PAGE.partition(text)
    return f"docs/reference/options.md:{before.count(chr(10)) + 1 if found else 1}"


def test_the_page_has_each_option_and_each_environment_variable() -> None:
    expect_none([*wrong_places(), *unlisted_options(), *wrong_variables()])


def test_the_defaults_on_the_page_hold() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE))
    retries = msgspec.to_builtins(Retries())
    told = [rows[name] for name in ("factor", "cap", "jitter", "immediate")]
    assert told == ["2", "3,600", "True", "0"]
    assert retries[2:6] == [2.0, 3600.0, True, 0]
