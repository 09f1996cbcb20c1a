"""Jobs of a large group in the LMDB store: none costs more for how many there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from lmdb_desk import job

from tidemill.brokers.base import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.record import Stored, state_and_line
from tidemill.job import Links, Outcome, Owner, State, Verdict

MANY = 20


def group(broker: LmdbBroker, waits: str) -> Callable[[Outcome], None]:
    """A job behind many; what settles each of these in a step of its own."""
    names = tuple(f"m{n:02}" for n in range(MANY))
    end = job(id="end", links=Links(waits=waits, inputs=names))
    broker.put([end, *[job(id=i, links=Links(next=("end",))) for i in names], job(id="last")])
    broker.attach(Owner(id="w", name="w"))
    leases = broker.exchange(Step("w", want=Want(MANY))).leases

    def settle(outcome: Outcome) -> None:
        for lease in leases:
            broker.exchange(Step("w", [Verdict(lease.token, outcome)]))

    return settle


@pytest.mark.parametrize("waits", ["success", "any", "failure", "barrier"])
def test_failures_after_the_first_do_not_read_the_job_behind(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    # its record has the ids of all in it
    settle, loads, load = group(broker, waits), Counter[bytes](), Moves.load

    def counted(moves: Moves, job_id: bytes) -> Stored | None:
        loads[job_id] += 1
        return load(moves, job_id)

    monkeypatch.setattr(Moves, "load", counted)
    settle(Outcome.FAIL)
    assert loads[b"end"] <= 2  # the first, and the last
    ends = {"success": State.CANCELLED, "barrier": State.FAILED}
    record = broker.get("end")
    assert record is not None
    assert record.state is ends.get(waits, State.READY)


def test_finished_jobs_look_once_whether_the_same_job_needs_them(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 15
    names = [f"m{n:02}" for n in range(MANY)]
    end = job(id="end", queue="later", links=Links(waits="any"))
    broker.put([end, *[job(id=i, links=Links(next=("end",))) for i in names]])
    broker.attach(Owner(id="w", name="w"))
    leases = broker.exchange(Step("w", want=Want(MANY, ("default",)))).leases
    broker.exchange(Step("w", [Verdict(it.token, Outcome.SUCCESS) for it in leases]))
    looks: list[bytes] = []

    def counted(data: bytes) -> tuple[int, int]:
        looks.append(data)
        return state_and_line(data)

    monkeypatch.setattr("tidemill.brokers.lmdb.flows.state_and_line", counted)
    monkeypatch.setattr(broker._time, "_offset", broker._time._offset + 100.0)
    broker.tick()
    assert len(looks) == 1
    assert broker.get(names[0]) is not None
