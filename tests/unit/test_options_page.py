"""docs/reference/options.md has every option and every environment variable."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import click
import msgspec
import pytest

from tidemill import Limit, Retries, Tidemill
from tidemill.brokers.http import address as http
from tidemill.brokers.lmdb import settings as lmdb
from tidemill.brokers.postgres import settings as postgres
from tidemill.brokers.rabbitmq import settings as rabbitmq
from tidemill.brokers.redis import address as redis
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


def test_each_option_of_tasks_calls_and_messages_says_where_it_applies() -> None:
    rows = named(section("Tasks, calls and messages").partition("| option of `Retries`")[0])
    wheres = {
        "task": TASK_OPTIONS,
        "call": CALL_OPTIONS,
        "put": PUT_OPTIONS,
        "publish": PUBLISH_OPTIONS,
    }
    for where, names in wheres.items():
        told = {name for name, places in rows.items() if where in places.split(", ")}
        assert told - {"name", "schedule"} == set(names), where


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Tasks, calls and messages", Retries.__struct_fields__),
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
    ],
)
def test_each_option_is_on_the_page(title: str, names: object) -> None:
    assert isinstance(names, (tuple, set, dict))
    assert {*names} - {*named(section(title))} == set()


def test_each_environment_variable_is_on_the_page() -> None:
    read = {
        variable
        for path in (ROOT / "src").rglob("*.py")
        for variable in re.findall(r"TIDEMILL_[A-Z_]+\b(?!\{)", path.read_text())
    }
    assert len(read) >= 8
    assert {*named(section("Environment variables"))} == read


def test_the_defaults_on_the_page_hold() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE))
    retries = msgspec.to_builtins(Retries())
    told = [rows[name] for name in ("factor", "cap", "jitter", "immediate")]
    assert told == ["2", "3,600", "True", "0"]
    assert retries[2:6] == [2.0, 3600.0, True, 0]
