"""A step that the store refuses: which notes and verdicts are stored anyway, and which are kept."""

from __future__ import annotations

from typing import Any

import pytest
from lmdb_desk import job

from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.core.job import Lease, Note, Outcome, Owner, State, Verdict
from tidemill.errors import StoreFull
from tidemill.worker.steps import RefusedVerdicts

POISON = "\ud800"
"""A text that no store takes."""


@pytest.fixture
def leases(broker: LmdbBroker) -> list[Lease]:
    """Two jobs that run."""
    broker.attach(Owner(id="o", name="w"))
    broker.put([job(id="ended"), job(id="running")])
    return broker.exchange(Step("o", want=Want(2))).leases


def test_a_refused_step_stores_its_notes_and_settles_a_job_that_is_held(
    broker: LmdbBroker, leases: list[Lease]
) -> None:
    # given: a verdict that cannot be stored, of a job that is stuck, and a note of another
    ended, running = leases
    bad = Verdict(ended.token, Outcome.FAIL, error=POISON, hold=True)
    notes = [Note(running.token, 3.0, 4.0)]
    refusals = RefusedVerdicts("o")
    with pytest.raises(UnicodeError) as refused:
        broker.exchange(Step("o", [bad], notes=notes))
    # when
    done = refusals.settle(broker, [bad], notes, refused.value)
    # then
    here, there = broker.get_many(["ended", "running"])
    assert here.state is State.FAILED
    assert (there.progress, done.notes) == ((3.0, 4.0), ())
    assert ([v.outcome for v in done.verdicts], done.answers) == ([Outcome.FAIL], [True])
    assert done.verdicts != [bad]
    assert done.reply.next_due == 0.0


def test_notes_that_cannot_be_stored_are_logged_and_not_offered_again(
    broker: LmdbBroker, leases: list[Lease], caplog: pytest.LogCaptureFixture
) -> None:
    refusals = RefusedVerdicts("o")
    notes = [Note(leases[0].token, line=POISON)]
    for _ in range(3):
        with pytest.raises(UnicodeError) as refused:
            broker.exchange(Step("o", notes=notes))
        assert refusals.settle(broker, [], notes, refused.value).notes == ()
    assert caplog.text.count("the store refused a step") == 1


class FullForOne:
    """A store that has no room for the verdict 1, and cannot store the verdict 13."""

    def exchange(self, step: Step) -> Reply:
        tokens = [verdict.token for verdict in step.verdicts]
        if 1 in tokens:
            raise StoreFull("no room")
        if 13 in tokens and step.verdicts[0].outcome is Outcome.SUCCESS:
            raise ValueError("poison")
        return Reply(settled=[True] * len(tokens))


def test_a_verdict_without_room_holds_up_no_other_verdict_of_a_refused_step() -> None:
    verdicts = [Verdict(token, Outcome.SUCCESS) for token in (1, 13, 2, 3)]
    store: Any = FullForOne()
    done = RefusedVerdicts("o").settle(store, verdicts, [], ValueError("poison"))
    assert done.answers == [None, True, True, True]
    assert [verdict.outcome for verdict in done.verdicts][1] is Outcome.FAIL


class Poisoned:
    """A store that cannot store any verdict on the job 13."""

    def exchange(self, step: Step) -> Reply:
        if any(verdict.token == 13 for verdict in step.verdicts):
            raise ValueError("poison")
        return Reply(settled=[True] * len(step.verdicts))


def test_a_job_without_a_storable_verdict_holds_up_no_other_verdict() -> None:
    verdicts = [Verdict(token, Outcome.SUCCESS) for token in (1, 13, 2)]
    store: Any = Poisoned()
    done = RefusedVerdicts("o").settle(store, verdicts, [], ValueError("poison"))
    assert done.answers == [True, None, True]
    assert done.verdicts == verdicts
