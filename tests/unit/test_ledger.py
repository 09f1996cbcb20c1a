"""What a worker remembers of its leases, for a store that has lost its latest steps."""

from __future__ import annotations

import pytest

from tidemill.brokers.base import Reply, Step
from tidemill.job import Lease, Outcome, Verdict
from tidemill.worker import ledger
from tidemill.worker.ledger import Ledger


def leases(*tokens: int) -> list[Lease]:
    return [Lease(token, 1, 0, 0, 0, 0.0, 0.0, 0.0, b"") for token in tokens]


def success(token: int, result: bytes = b"") -> Verdict:
    return Verdict(token, Outcome.SUCCESS, result=result)


def strays(book: Ledger, *tokens: int) -> list[tuple[int, Outcome]]:
    again = book.answered(Step("w"), Reply(strays=list(tokens)))
    return [(one.token, one.outcome) for one in again]


def test_leases_are_named_once_the_store_is_behind() -> None:
    book = Ledger()
    book.lend(leases(1, 2, 3))
    book.answered(Step("w", [success(1)]), Reply())
    assert book.held() is None
    book.answered(Step("w"), Reply(behind=True))
    held = book.held()
    assert held is not None
    assert sorted(held) == [2, 3]
    book.answered(Step("w"), Reply())  # a step that did not ask
    assert book.held() is not None
    book.answered(Step("w", held=held), Reply())
    assert book.held() is None


def test_strays_are_settled_as_they_were_and_others_go_back() -> None:
    # law 4
    book = Ledger()
    book.lend(leases(1, 2))
    book.answered(Step("w", [success(1)]), Reply())
    assert strays(book, 1, 7) == [(1, Outcome.SUCCESS), (7, Outcome.RELEASE)]
    # until that is stored they count as held
    book.answered(Step("w"), Reply(behind=True))
    assert sorted(book.held() or ()) == [1, 2, 7]


def test_a_lease_that_a_verdict_holds_stays_open() -> None:
    # law 8: the stuck process is not dead yet
    book = Ledger()
    book.lend(leases(1))
    stuck = Verdict(1, Outcome.RETRY, hold=True)
    book.answered(Step("w", [stuck]), Reply(behind=True))
    assert book.held() == [1]
    book.answered(Step("w", [Verdict(1, Outcome.RELEASE)]), Reply(behind=True))
    assert book.held() == []
    assert strays(book, 1) == [(1, Outcome.RETRY), (1, Outcome.RELEASE)]


@pytest.mark.parametrize("bound", ["KEPT_MOST", "KEPT_BYTES", "KEPT_FOR"])
def test_memory_of_verdicts_is_bounded(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(ledger, "machine_time", lambda: now)
    book = Ledger()
    book.settled([success(1, b"x" * 100)])
    monkeypatch.setattr(ledger, bound, 1 if bound == "KEPT_MOST" else 100)
    now += 101 if bound == "KEPT_FOR" else 0
    book.settled([success(2, b"x" * 100)])
    assert strays(book, 1, 2) == [(2, Outcome.SUCCESS), (1, Outcome.RELEASE)]


def test_a_worker_that_was_given_up_remembers_nothing() -> None:
    book = Ledger()
    book.lend(leases(1))
    book.settled([success(2)])
    book.answered(Step("w"), Reply(behind=True))
    book.forget()
    assert book.held() is None
    assert strays(book, 2) == [(2, Outcome.RELEASE)]
