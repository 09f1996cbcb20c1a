"""Finding jobs in the LMDB store: a rare value is found without a look at all jobs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from lmdb_desk import job

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter, matches
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.look import search
from tidemill.brokers.lmdb.look.inspect import Inspector
from tidemill.core.envelope import Envelope, Links
from tidemill.core.job import Outcome, Record, State, Verdict
from tidemill.core.owner import Owner

ENDS = (Outcome.SUCCESS, Outcome.FAIL, Outcome.CANCELLED, Outcome.EXPIRED)


@pytest.fixture
def broker(broker: LmdbBroker) -> LmdbBroker:
    """With jobs in every state, in two queues, made in turns."""
    broker.attach(Owner(id="o", name="w"))
    for turn, queue in itertools.product(range(4), ("a", "b")):
        broker.put([job(queue=queue) for _ in range(5)])
        leases = broker.exchange(Step("o", want=Want(5, (queue,)))).leases
        ends = [Verdict(lease.token, end) for lease, end in zip(leases, ENDS, strict=False)]
        broker.exchange(Step("o", verdicts=ends))
        key = f"{queue}{turn}"
        broker.put([job(queue=queue, key=key)])
        broker.exchange(Step("o", want=Want(1, (queue,))))
        broker.put([job(queue=queue, key=key, on_conflict="replace")])  # waits
        broker.put([job(queue=queue), job(queue=queue, delay=999, expires=9999)])
        broker.put([job(queue=queue, task="", ttr=9)])
    return broker


def everything(broker: LmdbBroker, what: Filter, limit: int = 100) -> list[Record]:
    found, cursor = [], ""
    while True:
        page = broker.find(what, limit, cursor)
        found += page.records
        cursor = page.cursor
        if not cursor:
            return found


@pytest.mark.parametrize(
    ("few", "look"), [(5000, 20_000), (-1, 10**9), (-1, 0)], ids=["gathered", "walked", "both"]
)
def test_every_way_finds_the_same(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch, few: int, look: int
) -> None:
    monkeypatch.setattr(search, "_FEW", few)
    monkeypatch.setattr(search, "_LOOK", look)
    monkeypatch.setattr("tidemill.brokers.lmdb.look.inspect._SCAN", 7)
    every = everything(broker, Filter())
    assert {record.state for record in every} == set(State)
    choices: list[set[State]] = [{state} for state in State]
    choices += [set(), {State.READY, State.RUNNING}, {State.SUCCEEDED, State.EXPIRED}, set(State)]
    some = every[5].envelope.id[:-3]
    for states, queue, limit in itertools.product(choices, ("", "a", "none"), (1, 3, 100)):
        for prefix in ("", some):
            what = Filter(states=frozenset(states), queue=queue, id_prefix=prefix)
            expected = [r.envelope.id for r in every if matches(r, what)]
            assert [r.envelope.id for r in everything(broker, what, limit)] == expected, what


def test_a_rare_state_is_found_without_looking_at_all(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[bytes] = []
    real = Inspector._shown

    def shown(self: Inspector, txn: Any, stored: Any, *others: Any) -> Record:
        looked.append(stored.id)
        return real(self, txn, stored, *others)

    monkeypatch.setattr(Inspector, "_shown", shown)
    broker.put([job(queue="c") for _ in range(3000)])
    for state, count in ((State.FAILED, 8), (State.RUNNING, 16), (State.SCHEDULED, 8)):
        looked.clear()
        assert len(everything(broker, Filter(states=frozenset({state})))) == count
        assert len(looked) <= 3 * count
    looked.clear()
    assert everything(broker, Filter(states=frozenset({State.FAILED}), queue="c")) == []
    assert looked == []


def test_jobs_of_flows_are_counted_before_they_are_gathered(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: more jobs have succeeded than are to be gathered for one page
    monkeypatch.setattr(search, "_FEW", 30)
    names = [f"z{n:02}" for n in range(30)]
    end = Envelope(id="end", task="t", queue="end", links=Links(waits="barrier"))
    broker.put([end, *[job(id=i, queue="c", links=Links(next=("end",))) for i in names]])
    leases = broker.exchange(Step("o", want=Want(30, ("c",)))).leases
    broker.exchange(Step("o", verdicts=[Verdict(v.token, Outcome.SUCCESS) for v in leases]))
    # when
    monkeypatch.setattr(search.Finding, "_gather", lambda *_: pytest.fail("all were gathered"))
    page = broker.find(Filter(states=frozenset({State.SUCCEEDED})), 3)
    # then
    assert [r.envelope.id for r in page.records] == names[:-4:-1]
