"""README and docs are true: their snippets run, their commands and links exist."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import click
import pytest

from tidemill import Tidemill
from tidemill.cli import main

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


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_python_snippets_are_python(page: Path) -> None:
    for snippet in blocks(page, "python"):
        ast.parse(snippet) if "await" not in snippet else compile(
            snippet, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )


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


def test_the_readmes_messages_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    snippet = next(b for b in blocks(ROOT / "README.md", "python") if "mill.queue(" in b)
    snippet = snippet.replace("timeout=5", "timeout=0")
    with Tidemill("memory://") as mill:
        exec(compile(snippet, "README.md", "exec"), {"mill": mill})
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


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_and_options_exist(page: Path) -> None:
    text = page.read_text()
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    lines += re.findall(r"`(tidemill [^`]+)`", text)
    for line in lines:
        found = re.match(r"\$?\s*tidemill ([a-z]+)(.*)", line.split("#")[0].split(" | ")[0])
        if not found:
            continue
        verb, rest = found.groups()
        command = main.get_command(click.Context(main), verb)
        assert command is not None, f"{page.name} names {verb!r}, which is no command"
        if isinstance(command, click.Group) and rest.strip("` "):
            inner = rest.split()[0]
            assert inner in command.commands, f"{page.name}: {verb} has no {inner}"
            command = command.commands[inner]
        options = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        for option in re.findall(r"(?<=\s)--?[a-zA-Z][a-z-]*", rest):
            assert option in options, f"{page.name}: {verb} has no option {option}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_make_targets_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"`make ([a-z]+)", page.read_text()):
            assert target in targets, f"{page.name} names make {target}"
