"""Errors about wrong names suggest a name that exists."""

from __future__ import annotations

import pytest

from tidemill.core.config import parse_url
from tidemill.core.suggest import did_you_mean, hint


def test_the_nearest_name_is_suggested() -> None:
    assert did_you_mean("quue", ["queue", "task"]) == "did you mean 'queue'?"
    assert did_you_mean("colour", ["queue", "task"]) == ""


def test_without_a_near_name_the_first_known_names_are_listed() -> None:
    assert hint("colour", ["task", "queue"]) == "known are queue, task"
    assert hint("colour", []) == "known are none"
    many = hint("colour", [f"q{n:02}" for n in range(30)])
    assert many.endswith("q18, q19, …")


@pytest.mark.parametrize("scheme", ["postgres", "POSTGRES", "postgresql"])
def test_both_schemes_of_postgresql_name_the_same_broker(scheme: str) -> None:
    url = parse_url(f"{scheme}://me@db/shop?schema=s")
    assert (url.scheme, url.path) == ("postgresql", "me@db/shop")
    assert url.options == {"schema": "s"}
