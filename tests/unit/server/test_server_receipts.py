"""Texts that are receipts, and texts that are not."""

from __future__ import annotations

import pytest
from moved_clock import MovedClock

from tidemill.core.clock import new_id
from tidemill.server.http import receipts
from tidemill.server.http.problems import Problem
from tidemill.server.http.receipts import (
    REPEATS,
    PutsById,
    Receipt,
    new_owner_id,
    parse,
    receipt_of,
    sealed,
)


def test_a_receipt_names_a_shared_owner() -> None:
    shared_owner = new_owner_id()
    assert parse(receipt_of(shared_owner, 17)) == Receipt(shared_owner, 17)
    for job_id in ("a", "ä/ö.1~", "x" * 200):
        assert parse(receipt_of(shared_owner, 17, job_id)) == Receipt(shared_owner, 17, job_id)
        then = receipt_of(shared_owner, 17, job_id, hands_on=True)
        assert parse(then) == Receipt(shared_owner, 17, job_id, hands_on=True)
    before = receipt_of(new_id(), 0)  # as servers gave them once
    wrong = (
        before,
        "desk-.0",
        "desk.0",
        "desk-ä.0",
        f"{shared_owner}.",
        shared_owner,
        f"{shared_owner}.0.",
        f"{shared_owner}.0.*",
        f"{shared_owner}.0.next",
    )
    for forged in (*wrong, f"{shared_owner}.0.YQ.YQ", f"{shared_owner}.0._w"):
        with pytest.raises(Problem, match="is not a valid receipt; use a receipt from"):
            parse(forged)


def test_a_sealed_receipt_is_valid_only_for_its_token() -> None:  # case S7
    plain = receipt_of(new_owner_id(), 17)
    receipt = sealed(plain, "hash of a token")
    assert parse(receipt, "hash of a token") == parse(receipt) == parse(plain)
    for forged in (plain, f"{plain}~", sealed(plain, "hash of another"), receipt + "0"):
        with pytest.raises(Problem, match="is not a valid receipt"):
            parse(forged, "hash of a token")


def test_a_put_by_id_is_remembered_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moved, puts = MovedClock(monkeypatch, 0), PutsById()
    puts.add("a", b"1")
    moved.advance(REPEATS - 1)
    puts.add("b", b"2")
    assert (puts.has("a", b"1"), puts.has("a", b"2"), puts.has("c", b"1")) == (True, False, False)
    moved.advance(1)
    assert (puts.has("a", b"1"), puts.has("b", b"2")) == (False, True)
    puts.add("c", b"3")
    assert list(puts._jobs) == ["b", "c"]  # what is too old takes no memory


def test_only_the_latest_puts_by_id_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "KEPT", 2)
    puts = PutsById()
    for job_id in ("a", "b", "a", "c"):
        puts.add(job_id, b"1")
    assert [puts.has(job_id, b"1") for job_id in ("a", "b", "c")] == [True, False, True]
