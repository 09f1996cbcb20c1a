"""How a rule of the house fails: with a line for each offence, not only for the first."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def expect_none(offences: Iterable[str]) -> None:
    """Fail if there are offences, and list them all."""
    if found := list(offences):
        pytest.fail("\n".join([f"{len(found)} found:", *found]), pytrace=False)
