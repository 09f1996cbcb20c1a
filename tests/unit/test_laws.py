"""The pages of laws and cases are true: every proof named is there and says what it proves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from servers import NETWORK

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
LINES = (DOCS / "laws.md").read_text().splitlines()
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in LINES
    if re.match(r"\| \d+ \|", line)
]
HEAD = next(line for line in LINES if line.startswith("| law |"))
BROKERS = [cell.strip() for cell in HEAD.strip("|").split("|")][2:-1]
KNOWN = set(re.findall(r"^\| ([A-Z]\d+) \|", (DOCS / "cases.md").read_text(), re.MULTILINE))


def marks(path: Path) -> str:
    """What a file says of itself, in comments and docstrings."""
    return path.read_text().lower()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"law {row[0]}")
def test_a_law_said_to_hold_is_proven_where_the_page_says(row: list[str]) -> None:
    number, _, *cells, proofs = row
    assert set(cells) <= {"yes", "no"}
    assert len(cells) == len(BROKERS)
    files = [name.strip() for name in proofs.split(",") if name.strip()]
    assert bool(files) == ("yes" in cells)
    for name in files:
        found = re.search(rf"\blaws? (\d+,? (and )?)*{number}\b", marks(TESTS / name))
        assert found, f"{name} marks no test with law {number}"
    for broker, cell in zip(BROKERS, cells, strict=True):
        # The conformance suite runs on all; other files are of one broker, or of the network's.
        common = (
            "conformance/",
            "unit/core/test_codec",
            *(("e2e/test_brokers",) * (broker in NETWORK)),
        )
        own = any(name.startswith(common) or broker in name for name in files)
        assert cell == "no" or own or broker == "lmdb", f"nothing proves law {number} on {broker}"


def test_all_nineteen_are_there() -> None:
    assert [row[0] for row in ROWS] == [str(number) for number in range(1, 20)]


def test_cases_named_in_tests_are_on_the_page() -> None:
    named = {
        case
        for path in TESTS.rglob("*.py")
        for line in re.findall(r"# cases? .*", path.read_text())
        for case in re.findall(r"\b[A-Z]\d+\b", line)
    }
    assert named <= KNOWN, f"unknown cases: {sorted(named - KNOWN)}"
    assert len(named) > 30
