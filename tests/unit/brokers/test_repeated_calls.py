"""Steps whose reply is lost: sent again under their serial, and answered, not done again."""

from __future__ import annotations

import pytest

from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.history_rows import MINUTE, HistoryRow, added
from tidemill.brokers.network.repeated_calls import RepeatedCalls
from tidemill.core.job import Lease, Note, Outcome, Verdict
from tidemill.errors import BrokerUnavailable, StoreFull


class Far:
    """A store behind a line: does each serial once, and may lose a request or a reply."""

    def __init__(self) -> None:
        self.serial = 0
        self.reply = Reply()
        self.settled: list[int] = []
        self.noted: list[str] = []
        self.leased = 0
        self.faults: list[str] = []
        self.history: HistoryRow | None = None

    def send(self, step: Step, serial: int) -> Reply:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "request":
            raise BrokerUnavailable("away")
        if fault == "full":
            raise StoreFull("full")
        if serial != self.serial:
            assert serial == self.serial + 1
            self.serial, self.reply = serial, self._do(step)
        if fault == "reply":
            raise BrokerUnavailable("away")
        return Reply(
            list(self.reply.settled),
            commands=list(self.reply.commands),
            leases=list(self.reply.leases),
        )

    def _do(self, step: Step) -> Reply:
        for row in step.history:
            self.history = added(self.history, row)
        settled = [v.token not in self.settled for v in step.verdicts]
        self.settled += [v.token for v in step.verdicts]
        self.noted += [note.line for note in step.notes]
        leases = []
        for _ in range(step.want.count if step.want else 0):
            self.leased += 1
            leases.append(Lease(self.leased, 1, 0, 0, 0, 0.0, 0.0, 0.0, b""))
        return Reply(settled, leases=leases)


def step(*tokens: int, want: int = 0, notes: tuple[str, ...] = ()) -> Step:
    verdicts = [Verdict(token, Outcome.SUCCESS) for token in tokens]
    return Step("w", verdicts, Want(want), notes=[Note(1, line=line) for line in notes])


@pytest.mark.parametrize("fault", ["reply", "request"])
def test_a_step_whose_reply_was_lost_is_done_once(fault: str) -> None:
    # law 4
    far = Far()
    talk = RepeatedCalls(far.send)
    assert [lease.token for lease in talk.exchange(step(want=2)).leases] == [1, 2]
    far.faults = [fault]
    with pytest.raises(BrokerUnavailable):
        talk.exchange(step(1, want=1, notes=("a",)))
    # when: the owner hands in the same again, and more
    reply = talk.exchange(step(1, 2, want=2, notes=("a", "b")))
    # then
    assert reply.settled == [True, True]
    assert [lease.token for lease in reply.leases] == [3, 4]
    assert far.settled == [1, 2]
    assert far.noted == ["a", "b"]
    assert talk.exchange(step(1)).settled == [False]


def rows(*numbers: int) -> Step:
    return Step("w", history=[HistoryRow("task", "a", MINUTE, 60, (n,), b"s") for n in numbers])


@pytest.mark.parametrize("faults", [["reply"], ["request"], ["reply", "", "reply"]])
def test_history_whose_reply_was_lost_is_added_once(faults: list[str]) -> None:
    far = Far()
    talk = RepeatedCalls(far.send)
    talk.exchange(rows(1))
    far.faults = list(faults)
    with pytest.raises(BrokerUnavailable):
        talk.exchange(rows(10))
    # when: a step without history comes between, and then the owner adds the same, and more
    talk.exchange(step()) if len(faults) == 1 else None
    if len(faults) > 1:
        with pytest.raises(BrokerUnavailable):
            talk.exchange(rows(10, 100))
    talk.exchange(rows(10, 100, 1000))
    # then
    assert far.history == HistoryRow("task", "a", MINUTE, 60, (1111,), b"s")
    talk.exchange(rows(10))
    assert far.history.counts == (1121,)


def test_a_held_verdict_does_not_answer_for_the_one_that_follows() -> None:
    # laws 4 and 8
    far = Far()
    talk = RepeatedCalls(far.send)
    held = Verdict(1, Outcome.RETRY, hold=True)
    far.faults = ["reply"]
    with pytest.raises(BrokerUnavailable):
        talk.exchange(Step("w", [held]))
    talk.exchange(Step("w", [held, Verdict(1, Outcome.RELEASE)]))
    assert far.settled == [1, 1]


def test_leases_on_their_way_are_among_those_the_owner_holds() -> None:
    # law 4: else they would count as strays, and be given back
    far = Far()
    talk = RepeatedCalls(far.send)
    sent: list[Step] = []
    talk._send = lambda one, serial: sent.append(one) or far.send(one, serial)  # type: ignore[func-returns-value]
    far.faults = ["reply"]
    with pytest.raises(BrokerUnavailable):
        talk.exchange(Step("w", want=Want(2), held=[40]))
    talk.exchange(Step("w", want=Want(2), held=[40]))
    assert sent[-1].held == [40, 1, 2]
