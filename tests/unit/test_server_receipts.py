"""Receipts: what is one, and what is none."""

from __future__ import annotations

import pytest

from tidemill.clock import new_id
from tidemill.server.problems import Problem
from tidemill.server.receipts import new_owner_id, parse, receipt_of


def test_a_receipt_is_one_of_a_desk() -> None:
    desk = new_owner_id()
    assert parse(receipt_of(desk, 17)) == (desk, 17)
    before = receipt_of(new_id(), 0)  # as servers gave them once
    for forged in (before, "desk-.0", "desk.0", "desk-ä.0", f"{desk}.", desk):
        with pytest.raises(Problem, match="is no receipt; reserve gives one, and what was"):
            parse(forged)
