"""A place for each test: store, app, workers; everything ended afterwards."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import itertools
import os
import pkgutil
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from disks import mounted
from harness import Place, open_place
from moved_clock import MovedClock
from servers import NETWORK, postgres_for_a_while, refuse_servers, served_for_a_while, share_servers
from tiers import FULL, MARKS, QUICK, SIZES, TIERS, tier_of
from xdist.scheduler import LoadScopeScheduling

import tidemill
from tidemill.core.clock import new_id

os.environ.pop("COLUMNS", None)  # which tests in several processes find set


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--tier``: run the tests of a tier, instead of all."""
    parser.addoption("--tier", choices=TIERS, default=FULL, help="run the tests of this tier")


@pytest.hookimpl(trylast=True)  # a folder may change the tier of its tests before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of later tiers than that of ``--tier``."""
    last = TIERS.index(config.getoption("tier"))
    tiers = [TIERS.index(tier_of(item)) for item in items]
    config.hook.pytest_deselected(
        items=[it for it, tier in zip(items, tiers, strict=True) if tier > last]
    )
    items[:] = [item for item, tier in zip(items, tiers, strict=True) if tier <= last]


def pytest_configure(config: pytest.Config) -> None:
    """Processes that test whole folders share the servers that no test kills."""
    # A shell starts background commands with SIGINT ignored, and our processes would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _import_all()
    hypothesis.settings.register_profile("busy", deadline=None)  # other tests run meanwhile
    hypothesis.settings.load_profile("busy")
    for name, (_, does) in MARKS.items():
        config.addinivalue_line("markers", f"{name}{does}")
    if config.getoption("tier") != FULL:
        for variable, size in SIZES.items():
            os.environ.setdefault(variable, size)
    if config.getoption("tier") == QUICK:
        refuse_servers()
        return
    several = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if several and any(Path(each).is_dir() for each in config.args):
        share_servers()


def _import_all() -> None:
    """Before there are threads: pytest parses anew what is imported, as we bring a plugin for it,
    and Pythons before 3.11.8 fail when two threads do so at once."""
    for module in pkgutil.walk_packages(tidemill.__path__, "tidemill."):
        needs_settings = module.name.startswith("tidemill.django.")
        if not module.name.endswith("__main__") and not needs_settings:
            with contextlib.suppress(ImportError):  # it needs what is not installed
                importlib.import_module(module.name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """How several processes share the tests out among them."""
    return ModulesThatShare(config, log)


class ModulesThatShare(LoadScopeScheduling):
    """Test by test; but modules whose tests share something whole, and first."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if _shares(path) else nodeid


@functools.cache
def _shares(path: str) -> bool:
    """Whether tests of a module share a fixture of the module, its own or one of its folder."""
    text = (ROOT / path).read_text()
    if 'scope="module"' in text:
        return True
    used = {name for names in _arguments(text).values() for name in names}
    return bool(used & _shared_in((ROOT / path).parent / "conftest.py"))


@functools.cache
def _shared_in(conftest: Path) -> set[str]:
    """The fixtures of a module that a folder has, and the fixtures that use them."""
    text = conftest.read_text() if conftest.exists() else ""
    shared = set(re.findall(r'scope="module"\)\ndef (\w+)', text))
    for name, used in _arguments(text).items():  # in their order, so users come later
        if shared & used:
            shared.add(name)
    return shared


def _arguments(text: str) -> dict[str, set[str]]:
    """The names of the arguments of each function of a module."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {each.name: {argument.arg for argument in each.args.args} for each in functions}


ROOT = Path(__file__).parent.parent
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _served_for_this_test() -> Iterator[None]:
    with postgres_for_a_while(), served_for_a_while():
        yield


@pytest.fixture
def moved_clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """The clocks of this process and of servers; they go on, and the test moves them ahead."""
    return MovedClock(monkeypatch)


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place on LMDB, or on the broker that the test or TIDEMILL_TEST_BROKER names."""
    broker = getattr(request, "param", os.environ.get("TIDEMILL_TEST_BROKER", "lmdb"))
    folder = tmp_path / f"p{next(_numbers)}"
    folder.mkdir()
    with open_place(folder, "" if broker == "lmdb" else NETWORK[broker](f"p{new_id()}")) as place:
        yield place


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MiB."""
    with mounted(tmp_path / "disk") as disk:
        yield disk
