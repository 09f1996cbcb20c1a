"""Held leases: a worker remembers its verdicts for a store that has lost its latest steps."""

from __future__ import annotations

import pytest
from moved_clock import MovedClock

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.core.job import Lease, Outcome, Verdict
from tidemill.worker import steps
from tidemill.worker.steps import HeldLeases


def leases(*tokens: int) -> list[Lease]:
    return [Lease(token, 1, 0, 0, 0, 0.0, 0.0, 0.0, b"") for token in tokens]


def success(token: int, result: bytes = b"") -> Verdict:
    return Verdict(token, Outcome.SUCCESS, result=result)


def strays(leases_held: HeldLeases, *tokens: int) -> list[tuple[int, Outcome]]:
    again = leases_held.answered(Step("w"), Reply(strays=list(tokens)))
    return [(one.token, one.outcome) for one in again]


def test_leases_are_named_once_the_store_is_behind() -> None:
    leases_held = HeldLeases()
    leases_held.lend(leases(1, 2, 3))
    leases_held.answered(Step("w", [success(1)]), Reply())
    assert leases_held.held() is None
    leases_held.answered(Step("w"), Reply(behind=True))
    held = leases_held.held()
    assert sorted(held) == [2, 3]
    leases_held.answered(Step("w"), Reply())  # a step that did not ask
    assert leases_held.held() is not None
    leases_held.answered(Step("w", held=held), Reply())
    assert leases_held.held() is None


def test_strays_are_settled_as_they_were_and_others_go_back() -> None:
    # law 4
    leases_held = HeldLeases()
    leases_held.lend(leases(1, 2))
    leases_held.answered(Step("w", [success(1)]), Reply())
    assert strays(leases_held, 1, 7) == [(1, Outcome.SUCCESS), (7, Outcome.RELEASE)]
    # until that is stored they count as held
    leases_held.answered(Step("w"), Reply(behind=True))
    assert sorted(leases_held.held() or ()) == [1, 2, 7]


def test_a_lease_that_a_verdict_holds_stays_open() -> None:
    # law 8: the stuck process is not dead yet
    leases_held = HeldLeases()
    leases_held.lend(leases(1))
    stuck = Verdict(1, Outcome.RETRY, hold=True)
    leases_held.answered(Step("w", [stuck]), Reply(behind=True))
    assert leases_held.held() == [1]
    leases_held.answered(Step("w", [Verdict(1, Outcome.RELEASE)]), Reply(behind=True))
    assert leases_held.held() == []
    assert strays(leases_held, 1) == [(1, Outcome.RETRY), (1, Outcome.RELEASE)]


@pytest.mark.parametrize("bound", ["KEPT_MOST", "KEPT_BYTES", "KEPT_FOR"])
def test_memory_of_verdicts_is_bounded(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MovedClock(monkeypatch, speed=0.0)
    leases_held = HeldLeases()
    leases_held.settled([success(1, b"x" * 100)])
    monkeypatch.setattr(steps, bound, 1 if bound == "KEPT_MOST" else 100)
    clock.advance(101 if bound == "KEPT_FOR" else 0)
    leases_held.settled([success(2, b"x" * 100)])
    assert strays(leases_held, 1, 2) == [(2, Outcome.SUCCESS), (1, Outcome.RELEASE)]


def test_an_idle_worker_drops_old_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MovedClock(monkeypatch, speed=0.0)
    leases_held = HeldLeases()
    leases_held.settled([success(1, b"x" * 100)])
    clock.advance(steps.KEPT_FOR + 1)
    leases_held.held()
    assert leases_held._bytes == 0
