"""A place for each test: store, app, workers; everything ended afterwards."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import mounted
from harness import Place, open_place
from servers import served_for_a_while, share_servers
from xdist.scheduler import LoadScopeScheduling

import tidemill

os.environ.pop("COLUMNS", None)  # which tests in several processes find set


def pytest_configure(config: pytest.Config) -> None:
    """Processes that test whole folders share the servers that no test kills."""
    _import_all()
    several = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if several and any(Path(each).is_dir() for each in config.args):
        share_servers()


def _import_all() -> None:
    """Before there are threads: pytest parses anew what is imported, as we bring a plugin for it,
    and Pythons before 3.11.8 fail when two threads do so at once."""
    for module in pkgutil.walk_packages(tidemill.__path__, "tidemill."):
        if not module.name.endswith("__main__"):
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
    return 'scope="module"' in (ROOT / path).read_text()


ROOT = Path(__file__).parent.parent
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _served_for_this_test() -> Iterator[None]:
    with served_for_a_while():
        yield


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / f"p{next(_numbers)}"
    folder.mkdir()
    with open_place(folder) as place:
        yield place


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MiB."""
    with mounted(tmp_path / "disk") as disk:
        yield disk
