"""docs/reference/cli.md has each verb of the command line, generated from its click command."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
from offences import expect_none

from tidemill.cli import _VERBS, main

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


def place(verb: str) -> str:
    """The line of a verb's block on the page."""
    before, _, _ = PAGE.partition(f"    :prog_name: tidemill {verb}\n")
    return f"docs/reference/cli.md:{before.count(chr(10)) + 1}"


def wrong_verbs() -> Iterator[str]:
    """What the page does not say, or says wrongly, of a verb."""
    shown = Counter(verb for *_, verb in BLOCKS)
    for verb in sorted({*VERBS, *shown}):
        if shown[verb] != (verb in VERBS):
            yield f"{place(verb)} {verb} has {shown[verb]} blocks, and not {int(verb in VERBS)}."
    for module, name, verb in BLOCKS:
        command = getattr(importlib.import_module(module), name, None)
        if command is not main.get_command(click.Context(main), verb):
            yield f"{place(verb)} {module}.{name} is not the command of {verb}."
    for verb in VERBS:
        # the text between a verb's block and the next block or heading
        _, _, rest = PAGE.partition(f"    :prog_name: tidemill {verb}\n    :depth: 2\n")
        text = re.split(r"^(?:#|:::)", rest, maxsplit=1, flags=re.MULTILINE)[0]
        command = main.get_command(click.Context(main), verb)
        if str(command.help).partition("\n")[0] != (sentence := _VERBS[verb][1]):
            yield f"src/tidemill/cli/__init__.py: the help of {verb} does not begin: {sentence}"
        if "`--json`" not in text and f"`{verb} list --json`" not in text:
            yield f"{place(verb)} the text on {verb} does not name `--json`."
        elif prints_json(command) and "has no `--json`" in text:
            yield f"{place(verb)} {verb} has `--json`, and the text says that it has none."
        elif not prints_json(command) and "has no `--json`" not in text:
            yield f"{place(verb)} {verb} has no `--json`. Say so in its text."


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


def wrong_options() -> Iterator[str]:
    for name, option in options(main):
        if not option.help:
            yield f"tidemill {name} has no help. Say what it does."
        if option.envvar and not option.show_envvar:
            yield f"tidemill {name} does not show its environment variable in its help."


def test_the_page_and_the_help_describe_each_verb_and_option() -> None:
    assert len(list(options(main))) > 100
    expect_none([*wrong_verbs(), *wrong_options()])
