"""Simulated tests name nothing inside the worker, so they stay when the worker is built anew."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

TESTS = sorted(Path(__file__).parent.glob("test_*.py"))
OFFERED = {"simulator", "tidemill", "pytest", "hypothesis", *sys.stdlib_module_names}


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_a_simulated_test_names_only_what_the_simulator_offers(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert {name.name for name in node.names} <= OFFERED
        elif isinstance(node, ast.ImportFrom):
            assert node.module in OFFERED or node.module == "collections.abc"
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), f"line {node.lineno}: {node.attr}"
