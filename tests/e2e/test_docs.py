"""README and docs are true: their snippets run, their commands and links exist."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from offences import expect_none

from tidemill import Tidemill
from tidemill.cli import main

pytestmark = pytest.mark.everyday

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / "README.md", ROOT / "examples" / "README.md"),
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "design"),
]
GUIDE = sorted((DOCS / "guide").glob("*.md"))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    found = re.findall(
        rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [textwrap.dedent(block) for block in found]


def test_the_readmes_first_example_does_what_it_says(tmp_path: Path) -> None:
    # given the two files of the README's first minute
    (tmp_path / "pyproject.toml").write_text("")
    shop = blocks(ROOT / "README.md", "python")[0]
    assert "timeout=10" in shop  # on a busy machine a worker may need longer to start
    (tmp_path / "shop.py").write_text(shop.replace("timeout=10", "timeout=60"))
    session = blocks(ROOT / "README.md", "console")[0]
    expected = session.strip().splitlines()[-1]
    environment = {name: value for name, value in os.environ.items() if name != "TIDEMILL_URL"}
    worker = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "worker", "shop:mill", "-p", "1"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    # when the script is run beside a worker
    try:
        script = subprocess.run(
            [sys.executable, "shop.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    finally:
        worker.terminate()
        worker.wait(60)
    # then it prints what the README prints
    assert script.stdout.strip() == expected
    assert (tmp_path / ".tidemill" / "data.mdb").exists()


def test_the_guides_first_messages_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    snippet = blocks(DOCS / "guide" / "messages.md", "python")[0]
    with Tidemill("memory://") as mill:
        exec(compile(snippet, "messages.md", "exec"), {"mill": mill})
        assert capsys.readouterr().out == "{'order': 17} 1\n"
        (orders,) = mill.queues()
        assert (orders.ready, orders.running, orders.scheduled) == (0, 0, 1)


@pytest.mark.parametrize("page", GUIDE, ids=named)
def test_the_snippets_of_a_guide_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an app, as each page of the guide takes for granted
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEMILL_URL", f"lmdb://{tmp_path / 'guide'}")
    names: dict[str, object] = {"Tidemill": Tidemill, "mill": Tidemill()}
    root = logging.getLogger()
    level = root.level
    # when the snippets run one after the other, then none raises
    with monkeypatch.context() as logs:
        logs.setattr(root, "handlers", [])  # a page configures logging
        for snippet in blocks(page, "python"):
            # on a busy machine a worker may need longer
            patient = snippet.replace("timeout=5)", "timeout=60)")
            exec(compile(patient, page.name, "exec"), names)
    root.setLevel(level)
    for value in list(names.values()):
        if isinstance(value, Tidemill):
            value.close()


def broken_snippets(page: Path) -> Iterator[str]:
    """The snippets that are not Python, each after the place of its first line."""
    for snippet in blocks(page, "python"):
        try:
            compile(snippet, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except SyntaxError as error:
            yield f"{place(page, snippet.splitlines()[0])} a snippet is no Python: {error.msg}."


def wrong_commands(page: Path) -> Iterator[str]:
    """The commands and options that tidemill does not have."""
    text = page.read_text()
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    lines += re.findall(r"`(tidemill [^`]+)`", text)
    for line in lines:
        found = re.match(r"\$?\s*tidemill ([a-z]+)(.*)", line.split("#")[0].split(" | ")[0])
        if not found:
            continue
        verb, rest = found.groups()
        command = main.get_command(click.Context(main), verb)
        if isinstance(command, click.Group) and rest.strip("` "):
            verb = f"{verb} {rest.split()[0]}"
            command = command.commands.get(rest.split()[0])
        if command is None:
            yield f"{place(page, line)} tidemill has no command {verb!r}."
            continue
        options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        for option in re.findall(r"(?<=\s)--?[a-zA-Z][a-z-]*", rest):
            if option not in options:
                yield f"{place(page, line)} tidemill {verb} has no option {option}."


def broken_links(page: Path) -> Iterator[str]:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        if not (page.parent / link).exists():
            yield f"{place(page, f']({link})')} links to {link}, which does not exist."
    for target in re.findall(r"`make ([a-z]+)", text):
        if target not in targets:
            yield f"{place(page, f'make {target}')} the Makefile has no target {target}."


def place(page: Path, text: str) -> str:
    """The first line of a page that has a text."""
    before, _, _ = page.read_text().partition(text)
    return f"{named(page)}:{before.count(chr(10)) + 1}"


def test_the_snippets_commands_and_links_of_all_pages_are_true() -> None:
    checks = (broken_snippets, wrong_commands, broken_links)
    expect_none(offence for page in PAGES for check in checks for offence in check(page))
