"""The pages of laws and cases are true: tests name each law and case, and no others."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from offences import expect_none
from servers import NETWORK

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
LAWS = [(n, line) for n, line in enumerate((DOCS / "laws.md").read_text().splitlines(), 1)]
HEAD = next(line for _, line in LAWS if line.startswith("| law |"))
BROKERS = [cell.strip() for cell in HEAD.strip("|").split("|")][2:-1]
ROWS = {
    f"docs/laws.md:{number}": [cell.strip() for cell in line.strip("|").split("|")]
    for number, line in LAWS
    if re.match(r"\| \d+ \|", line)
}
CASE = r"[A-Z]+[0-9]+"
CASES = {
    line.split("|")[1].strip(): f"docs/{page}:{number}"
    for page, row in (("cases.md", r"\| (?!case \|)"), ("how-to/security.md", rf"\| {CASE} \|"))
    for number, line in enumerate((DOCS / page).read_text().splitlines(), 1)
    if re.match(row, line)
}


@functools.cache
def marks(name: str) -> str:
    """What a file of tests says of itself, in comments and docstrings."""
    path = TESTS / name
    return path.read_text().lower() if path.is_file() else ""


def unproven_laws() -> Iterator[str]:
    for place, (number, _, *cells, proofs) in ROWS.items():
        if len(cells) != len(BROKERS) or not {*cells} <= {"yes", "no"}:
            yield f"{place} law {number} does not say yes or no of each broker."
            continue
        files = [name.strip() for name in proofs.split(",") if name.strip()]
        if not files or "yes" not in cells:
            yield f"{place} law {number} holds on no broker, or names no test."
        for name in files:
            if not re.search(rf"\blaws? (\d+,? (and )?)*{number}\b", marks(name)):
                yield f"{place} tests/{name} marks no test with law {number}."
        for broker, cell in zip(BROKERS, cells, strict=True):
            # The conformance suite runs on all; other files are of one broker, or of the network's.
            common = (
                "conformance/",
                "unit/core/test_codec",
                *(("e2e/test_brokers",) * (broker in (*NETWORK, "rabbitmq"))),
            )
            own = any(name.startswith(common) or broker in name for name in files)
            if cell == "yes" and not own and broker != "lmdb":
                yield f"{place} no test named there proves law {number} on {broker}."


def unknown_laws() -> Iterator[str]:
    known = {row[0] for row in ROWS.values()}
    for place, comment in comments(r"laws?"):
        for listed in re.findall(r"\blaws? ((?:\d+(?:,? and |, )?)+)", comment):
            for number in re.findall(r"\d+", listed):
                if number not in known:
                    yield f"{place} names law {number}, which docs/laws.md does not have."


def comments(word: str) -> Iterator[tuple[str, str]]:
    """Place and text of each comment in tests that has a word before a number."""
    for path in sorted(TESTS.rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if found := re.search(rf"#.*\b{word} [A-Z]*[0-9].*", line):
                yield f"{path.relative_to(TESTS.parent)}:{number}", found[0]


def cases_named() -> Iterator[tuple[str, str]]:
    """Place and case, for each case that a comment in tests names."""
    for place, comment in comments(r"cases?"):
        for listed in re.findall(rf"\bcases? ((?:{CASE}(?:,? and |, )?)+)", comment):
            for case in re.findall(CASE, listed):
                yield place, case


def is_test(place: str) -> bool:
    """Whether a file has tests; those of Django's kind lie in a folder of their own."""
    return "/test_" in place or "/behaviours/" in place


def misnamed_cases() -> Iterator[str]:
    named = list(cases_named())
    tested = {case for place, case in named if is_test(place)}
    for case, place in CASES.items():
        if not re.fullmatch(CASE, case):
            yield f"{place} {case} is no name of a case: write letters, then a number."
        elif case not in tested:
            yield f"{place} no test names case {case}."
    for place, case in named:
        if case not in CASES:
            yield f"{place} names case {case}, which no page of cases has."


def test_each_law_is_proven_where_the_page_says() -> None:
    assert [row[0] for row in ROWS.values()] == [str(number) for number in range(1, 20)]
    expect_none([*unproven_laws(), *unknown_laws()])


def test_each_case_is_named_by_a_test() -> None:
    assert len(CASES) > 50
    expect_none(misnamed_cases())
