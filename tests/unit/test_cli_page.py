"""docs/reference/cli.md has each verb of the command line, generated from its click command."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tidemill.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
BLOCKS = re.findall(
    r"^::: mkdocs-click\n    :module: (\S+)\n    :command: (\S+)\n    :prog_name: tidemill (\S+)\n",
    PAGE,
    re.MULTILINE,
)
VERBS = main.list_commands(click.Context(main))


def prints_json(command: click.Command) -> bool:
    """True when the command, or a command of this group, has ``--json``."""
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return any("--json" in p.opts for p in command.params) or any(map(prints_json, inner))


def test_each_verb_is_on_the_page_once() -> None:
    assert sorted(verb for *_, verb in BLOCKS) == sorted(VERBS)


@pytest.mark.parametrize(("module", "name", "verb"), BLOCKS)
def test_a_block_names_the_command_of_its_verb(module: str, name: str, verb: str) -> None:
    command = getattr(importlib.import_module(module), name)
    assert command is main.get_command(click.Context(main), verb)


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_says_what_a_verb_prints_for_programs(verb: str) -> None:
    # given the text between a verb's block and the next block or heading
    _, _, rest = PAGE.partition(f"    :prog_name: tidemill {verb}\n    :depth: 2\n")
    text = re.split(r"^(?:#|:::)", rest, maxsplit=1, flags=re.MULTILINE)[0]
    # when the verb has --json, then the text says what it prints; else it says that it has none
    command = main.get_command(click.Context(main), verb)
    assert command is not None
    assert "`--json`" in text or f"`{verb} list --json`" in text
    assert prints_json(command) is ("has no `--json`" not in text)


def options(command: click.Command, words: str = "") -> Iterator[tuple[str, click.Option]]:
    """The visible options of a command, and of the commands of its group."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), name)
            assert inner is not None
            yield from options(inner, f"{words} {name}".strip())
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            yield f"{words} {option.opts[0]}".strip(), option


OPTIONS = dict(options(main))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_help_says_what_an_option_does(name: str) -> None:
    assert OPTIONS[name].help


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name].envvar])
def test_the_help_names_the_environment_variable_of_an_option(name: str) -> None:
    assert OPTIONS[name].show_envvar
