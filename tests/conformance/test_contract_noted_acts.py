"""Acts on jobs that replace a note in the same commit: of two actors, one alone acts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest
from broker_driver import LiveOwner, ids_of, job
from kinds import Clock
from test_contract_admin import in_every_state

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import History, NotedAct, with_history
from tidemill.brokers.contract.history_rows import ALWAYS, MOST_NOTED, HistoryRow
from tidemill.core.clock import clock
from tidemill.core.errors import StoreMoved
from tidemill.core.job import Outcome, State
from tidemill.core.priority import rank_of

AT = int(clock.wall())


@pytest.fixture
def history(need: Callable[[Feature], None], broker: Broker) -> History:
    need(Feature.HISTORY)
    return with_history(broker, "history")


def note(sample: bytes = b"1", name: str = "ä") -> HistoryRow:
    return HistoryRow("bulk", name, ALWAYS, AT, (), sample)


def notes(history: History) -> list[bytes]:
    return [row.sample for row in history.history("bulk", ALWAYS)]


def standing(broker: Broker, ids: list[str]) -> list[tuple[State, int, str, bool]]:
    records = [broker.get(job_id) for job_id in ids]
    return [(r.state, r.rank, r.envelope.queue, r.cancelling) for r in records if r is not None]


def test_a_note_is_replaced_only_as_it_is_known(history: History) -> None:
    other = note(b"stop", "ä\x1fstop")
    assert not history.replace_note(note(b"1"), [note(b"2")])
    history.keep_history([note(b"1"), other])
    assert history.replace_note(
        note(b"1"), [note(b"2"), msgspec.structs.replace(other, sample=b"")]
    )
    assert notes(history) == [b"2"]
    assert not history.replace_note(note(b"1"), [note(b"3")])
    assert notes(history) == [b"2"]
    assert history.replace_note(note(b"2"), [note(b"")])
    assert notes(history) == []


def test_a_note_is_replaced_while_workers_add_rows(history: History, worker: LiveOwner) -> None:
    task = HistoryRow("task", "a", 60, AT // 60 * 60, (1,))
    history.keep_history([note(b"0")])
    for n in range(5):
        worker.exchange(history=[task])
        assert history.replace_note(note(b"%d" % n), [note(b"%d" % (n + 1))])
        assert not history.replace_note(note(b"%d" % n), [note(b"x")])
    assert notes(history) == [b"5"]
    assert history.history("task", 60) == [msgspec.structs.replace(task, counts=(5,))]


def test_an_act_replaces_its_note(broker: Broker, history: History) -> None:
    jobs = [job() for _ in range(MOST_NOTED)]
    broker.put(jobs)
    history.keep_history([note(b"1")])
    gone = NotedAct("delete", ids_of(jobs))
    assert history.act_noted(gone, note(b"1"), note(b"2")) == [True] * MOST_NOTED
    assert notes(history) == [b"2"]
    assert [broker.get(one.id) for one in jobs] == [None] * MOST_NOTED
    assert history.act_noted(NotedAct("delete", ["x"]), note(b"2"), note(b"3")) == [False]
    assert notes(history) == [b"3"]


def test_nothing_is_done_for_another_note(
    broker: Broker, history: History, worker: LiveOwner, clock: Clock
) -> None:
    ids = list(in_every_state(broker, worker, clock).values())
    before = standing(broker, ids)
    history.keep_history([note(b"2"), note(b"1", "b")])
    for verb in ("cancel", "terminate", "kick", "delete", "alter"):
        act = NotedAct(verb, ids, rank=rank_of(9), queue="other")  # type: ignore[arg-type]
        for known in (note(b"1"), note(b"2", "a"), note(b"2", "b")):
            assert (
                history.act_noted(act, known, msgspec.structs.replace(known, sample=b"3")) is None
            )
    assert standing(broker, ids) == before
    assert notes(history) == [b"1", b"2"]


def test_each_act_is_as_without_a_note(
    broker: Broker, history: History, worker: LiveOwner, clock: Clock
) -> None:
    by_state = in_every_state(broker, worker, clock)
    states, ids = list(by_state), list(by_state.values())
    history.keep_history([note(b"0")])
    waits = {State.WAITING, State.SCHEDULED, State.READY}
    act = NotedAct("alter", ids, queue="other")
    assert history.act_noted(act, note(b"0"), note(b"1")) == [s in waits for s in states]
    kicked = {State.SCHEDULED, State.FAILED, State.CANCELLED, State.EXPIRED}
    act = NotedAct("kick", ids)
    assert history.act_noted(act, note(b"1"), note(b"2")) == [s in kicked for s in states]
    act = NotedAct("terminate", ids)
    done = history.act_noted(act, note(b"2"), note(b"3"))
    assert done == [s is not State.SUCCEEDED for s in states]
    assert [command.verb for command in worker.exchange().commands] == ["terminate"]


def test_an_altered_job_counts_once(broker: Broker, history: History) -> None:
    first, second = job("a"), job("b", priority=3)
    broker.put([first, second])
    history.keep_history([note(b"0")])
    ids = [first.id, second.id, first.id]
    act = NotedAct("alter", ids, rank=rank_of(3), queue="b")
    assert history.act_noted(act, note(b"0"), note(b"1")) == [True, False, False]
    assert history.act_noted(act, note(b"1"), note(b"2")) == [False, False, False]
    assert broker.alter(ids, rank=rank_of(3), queue="b") == [True, True, True]


def test_of_many_actors_one_acts(broker: Broker, history: History, worker: LiveOwner) -> None:
    given = job()
    broker.put([given])
    [lease] = worker.take()
    worker.settle(lease, Outcome.FAIL)
    history.keep_history([note(b"0")])
    answers: list[list[bool] | None] = []
    ready = threading.Barrier(4)

    def act(n: int) -> None:
        ready.wait()
        kick = NotedAct("kick", [given.id])
        answers.append(history.act_noted(kick, note(b"0"), note(b"by %d" % n)))

    threads = [threading.Thread(target=act, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(answers, key=str) == [None, None, None, [True]]


def test_a_store_that_moves_refuses(
    broker: Broker, history: History, need: Callable[[Feature], None]
) -> None:
    need(Feature.MOVE)
    given = job()
    broker.put([given])
    history.keep_history([note(b"0")])
    broker.depart("elsewhere")  # type: ignore[attr-defined]
    with pytest.raises(StoreMoved):
        history.act_noted(NotedAct("delete", [given.id]), note(b"0"), note(b"1"))
    assert broker.get(given.id) is not None
    assert notes(history) == [b"0"]
