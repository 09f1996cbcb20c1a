"""Maps that threads share are looked through as copies: another thread may add to them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.brokers.lmdb.owners import Owners as LmdbOwners
from tidemill.brokers.redis.owners import Owners as RedisOwners

pytestmark = pytest.mark.everyday

SOURCE = Path(tidemill.__file__).parent
SHARED = {"_owners", "_by_number", "_by_id", "_attached"}
SHARED |= {"tasks", "running", "_interrupted", "_unsent"}
"""Maps that one thread may change while another thread reads them without a lock."""


class Growing(list[int]):
    """Look through the watched names of an owner while another owner attaches."""

    def __init__(self, members: dict[Any, Any]) -> None:
        super().__init__([7])
        self.members = members

    def __iter__(self) -> Iterator[int]:
        self.members["new"] = type("Member", (), {"watched": [9]})
        return super().__iter__()


@pytest.mark.parametrize(("kind", "field"), [(LmdbOwners, "_by_id"), (RedisOwners, "_by_id")])
def test_owners_may_attach_while_others_choose_neighbours(kind: Any, field: str) -> None:
    # Given two owners of this process.
    members, heard = kind.__new__(kind), []
    attached: dict[Any, Any] = {}
    setattr(members, field, attached)
    for name in ("one", "two"):
        attached[name] = type("Member", (), {"watched": Growing(attached)})
    members._liveness = type("Liveness", (), {"unwatch": staticmethod(heard.append)})
    # When a third attaches in the middle; then the look ends well.
    members._unwatch()
    assert heard[0] >= {7}


def loops(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)):
            yield node.iter


def looked_through(path: Path) -> Iterator[str]:
    """The maps that a module loops over as they are, with their places."""
    for looked in loops(ast.parse(path.read_text())):
        if isinstance(looked, ast.Call) and isinstance(looked.func, ast.Attribute):
            if looked.func.attr not in ("values", "items", "keys"):
                continue
            looked = looked.func.value
        if isinstance(looked, ast.Attribute) and looked.attr in SHARED:
            yield f"{path.relative_to(SOURCE)}:{looked.lineno}: {looked.attr}"


def test_shared_maps_are_looked_through_as_copies() -> None:
    found = [place for path in sorted(SOURCE.rglob("*.py")) for place in looked_through(path)]
    assert not found, f"these may change during the loop; copy them first: {found}"
