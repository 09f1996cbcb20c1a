"""``make quick`` and ``make test`` run what CONTRIBUTING says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from chosen import ON_RABBITMQ, OVER_HTTP, WHOLE_OVER_HTTP
from tiers import FOLDERS

TESTS = Path(__file__).parents[1]
LAW = re.compile(r"\blaws? ((?:\d+,? (?:and )?)*\d+)")


def test_each_folder_of_tests_has_a_tier() -> None:
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    assert folders <= set(FOLDERS)


def test_tests_chosen_for_a_broker_are_there() -> None:
    contract = TESTS / "conformance"
    texts = {
        path.stem.removeprefix("test_contract_"): path.read_text()
        for path in contract.glob("test_contract_*.py")
    }
    assert {*ON_RABBITMQ, *WHOLE_OVER_HTTP} <= set(texts)
    names = {(file, name) for file, names in OVER_HTTP.items() for name in names}
    assert [each for each in names if f"\ndef test_{each[1]}(" not in texts[each[0]]] == []


def test_make_test_proves_each_law_with_processes() -> None:
    proven: set[int] = set()
    for path in [*(TESTS / "e2e").glob("test_*.py"), *(TESTS / "faults").glob("test_*.py")]:
        text = path.read_text()
        lines, everywhere = text.splitlines(), "pytestmark = pytest.mark.everyday" in text
        for node in ast.parse(text).body:
            marks = [ast.unparse(each) for each in getattr(node, "decorator_list", ())]
            if everywhere or any(each.startswith("pytest.mark.everyday") for each in marks):
                body = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                proven.update(map(int, re.findall(r"\d+", " ".join(LAW.findall(body)))))
    assert set(range(1, 20)) <= proven
