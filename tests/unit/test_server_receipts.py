"""Receipts: what is one, and what is none."""

from __future__ import annotations

import pytest

from tidemill.clock import new_id
from tidemill.server.problems import Problem
from tidemill.server.receipts import Receipt, new_owner_id, parse, receipt_of, sealed


def test_a_receipt_is_one_of_a_desk() -> None:
    desk = new_owner_id()
    assert parse(receipt_of(desk, 17)) == Receipt(desk, 17)
    for job_id in ("a", "ä/ö.1~", "x" * 200):
        assert parse(receipt_of(desk, 17, job_id)) == Receipt(desk, 17, job_id)
    before = receipt_of(new_id(), 0)  # as servers gave them once
    wrong = before, "desk-.0", "desk.0", "desk-ä.0", f"{desk}.", desk, f"{desk}.0.", f"{desk}.0.*"
    for forged in (*wrong, f"{desk}.0.YQ.YQ", f"{desk}.0._w"):
        with pytest.raises(Problem, match="is no receipt; reserve gives one, and what was"):
            parse(forged)


def test_a_sealed_receipt_is_good_for_its_token_alone() -> None:
    plain = receipt_of(new_owner_id(), 17)
    receipt = sealed(plain, "hash of a token")
    assert parse(receipt, "hash of a token") == parse(receipt) == parse(plain)
    for forged in (plain, f"{plain}~", sealed(plain, "hash of another"), receipt + "0"):
        with pytest.raises(Problem, match="is no receipt"):
            parse(forged, "hash of a token")
