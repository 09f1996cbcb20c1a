"""docs/reference/http-api.md has each call of the job server."""

from __future__ import annotations

import re
from pathlib import Path

from offences import expect_none

from tidemill.server.http.api import ENDPOINTS

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "http-api.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]


def has(row: str, method: str, path: str) -> bool:
    """True when the row has the method, and all words of the path: a row shortens its paths."""
    words = {part for part in path.split("/") if part not in ("", "v1") and "{" not in part}
    code = " ".join(re.findall(r"`([^`]+)`", row))
    return {method, *words} <= {*re.findall(r"\w+", code)}


def test_the_page_has_each_call_of_the_server() -> None:
    assert len(ENDPOINTS) > 50
    expect_none(
        f"docs/reference/http-api.md has no row for {each.method} {each.path}."
        for each in ENDPOINTS
        if not any(has(row, each.method, each.path) for row in ROWS)
    )
