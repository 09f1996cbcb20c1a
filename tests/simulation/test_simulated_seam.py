"""Simulated tests name nothing inside the worker, so they stay when the worker is built anew."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from offences import expect_none

TESTS = sorted(Path(__file__).parent.glob("test_*.py"))
OFFERED = {"simulator", "offences", "tidemill", "pytest", "hypothesis", *sys.stdlib_module_names}


def test_simulated_tests_name_only_what_the_simulator_offers() -> None:
    expect_none(offence for path in TESTS for offence in offences_of(path))


def offences_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            named = [(node.module or "").removesuffix(".abc")]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            yield f"{path.name}:{node.lineno} names {node.attr}. Ask the simulator for it."
            continue
        else:
            continue
        for module in named:
            if module not in OFFERED:
                yield f"{path.name}:{node.lineno} imports {module}. Import it in simulator.py."
