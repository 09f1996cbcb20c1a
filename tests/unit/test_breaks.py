"""The list of breaks fits the product: each place that a break changes is there once."""

from __future__ import annotations

from breaks import BREAKS


def test_each_break_finds_its_place_once() -> None:
    found = {one.what: one.place().read_text().count(one.old) for one in BREAKS}
    assert {what: count for what, count in found.items() if count != 1} == {}
