"""History: rows are added with the verdicts of their step, read by period, and pruned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broker_driver import LiveOwner, job
from test_contract_remote_owners import Guest

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import History, with_history
from tidemill.brokers.contract.history_rows import ALWAYS, HOUR, KEEP, MINUTE, HistoryRow, join_name
from tidemill.brokers.contract.store import Store
from tidemill.core.clock import clock
from tidemill.core.job import Outcome, Verdict

DONE = Outcome.SUCCESS
NOW = int(clock.wall()) // HOUR * HOUR
ODD = join_name("q ü", "app.wörk '\"{}%\\ 💥", "1.0\t\x7f")
LONG_NAMES = [join_name("q" * 200, "ß" * 100, end * 200) for end in "yx"]


@pytest.fixture
def history(need: Callable[[Feature], None], broker: Broker) -> History:
    need(Feature.HISTORY)
    return with_history(broker, "history")


def row(
    name: str = "a",
    counts: tuple[int, ...] = (1,),
    at: int = NOW,
    *,
    kind: str = "task",
    span: int = MINUTE,
    sample: bytes = b"",
) -> HistoryRow:
    return HistoryRow(kind, name, span, at, counts, sample)


def test_a_new_store_has_no_history(history: History) -> None:
    assert history.history("task", MINUTE) == []
    assert history.history_kinds() == []


def test_kinds_with_rows_are_listed(history: History, worker: LiveOwner) -> None:
    worker.exchange(history=[row(), row("b"), row(span=HOUR), row(kind="tas")])
    history.keep_history([row(kind="mute", span=ALWAYS, at=0, sample=b"x"), row(kind="gone")])
    history.keep_history([row(kind="gone", counts=())])
    kinds = [("mute", ALWAYS), ("tas", MINUTE), ("task", MINUTE), ("task", HOUR)]
    assert history.history_kinds() == kinds


def test_rows_are_added_with_the_verdicts_of_their_step(
    broker: Store, history: History, worker: LiveOwner
) -> None:
    broker.put([job(), job()])
    first, second = worker.take(2)

    reply = worker.exchange(verdicts=[Verdict(first.token, DONE)], history=[row(counts=(1, 0, 7))])
    assert reply.settled == [True]
    assert history.history("task", MINUTE) == [row(counts=(1, 0, 7))]

    worker.exchange(
        verdicts=[Verdict(second.token, Outcome.FAIL)],
        history=[row(counts=(0, 1, 2)), row(span=HOUR)],
    )
    assert history.history("task", MINUTE) == [row(counts=(1, 1, 9))]
    assert history.history("task", HOUR) == [row(span=HOUR)]


def test_places_are_added_one_by_one_and_missing_places_count_as_0(
    history: History, worker: LiveOwner
) -> None:
    worker.exchange(history=[row(counts=(5, 2**40))])
    worker.exchange(history=[row(counts=(1, 2**40, 3, 4))])
    worker.exchange(history=[row(counts=(-2,)), row(counts=(0, 0, 0, 1))])
    worker.exchange(history=[row(counts=())])
    assert history.history("task", MINUTE) == [row(counts=(4, 2**41, 3, 5))]


def test_the_latest_sample_that_is_not_empty_stays(history: History, worker: LiveOwner) -> None:
    worker.exchange(history=[row(sample=b"one\0\xff")])
    assert history.history("task", MINUTE) == [row(sample=b"one\0\xff")]
    worker.exchange(history=[row(sample=b"two"), row()])
    worker.exchange(history=[row()])
    assert history.history("task", MINUTE) == [row(counts=(4,), sample=b"two")]


def test_rows_are_read_by_kind_span_time_and_name_in_order(
    history: History, worker: LiveOwner
) -> None:
    times = [NOW - 600, NOW - 60, NOW]
    rows = [row(name, at=at) for at in times for name in ("", "B", "a", "ab", "ü")]
    others = [row("x", span=HOUR), row("x", kind="tas"), row("x", kind="task2")]
    worker.exchange(history=[*rows[::-1], *others])

    assert history.history("task", MINUTE) == rows
    assert history.history("task", MINUTE, NOW - 60) == rows[5:]
    assert history.history("task", MINUTE, NOW - 600, NOW) == rows[:10]
    assert history.history("task", MINUTE, NOW - 60, NOW - 60) == []
    assert history.history("task", MINUTE, name="a") == [row("a", at=at) for at in times]
    assert history.history("task", MINUTE, NOW, name="ü") == [row("ü")]
    assert history.history("task", MINUTE, name="b") == []
    assert history.history("task", HOUR) == [others[0]]
    assert history.history("tas", MINUTE) == [others[1]]
    assert history.history("task2", MINUTE, NOW) == [others[2]]


def test_names_may_have_any_characters_and_be_long(history: History, worker: LiveOwner) -> None:
    names = [ODD, *LONG_NAMES]
    worker.exchange(history=[row(name) for name in names])
    worker.exchange(history=[row(name) for name in names])
    for name in names:
        assert history.history("task", MINUTE, name=name) == [row(name, (2,))]
    assert [each.name for each in history.history("task", MINUTE)] == sorted(names)
    history.keep_history([row(LONG_NAMES[0], (9,)), row(LONG_NAMES[1], ())])
    assert history.history("task", MINUTE) == [row(ODD, (2,)), row(LONG_NAMES[0], (9,))]


def test_kept_rows_replace_rows_and_empty_rows_delete_them(
    history: History, worker: LiveOwner
) -> None:
    worker.exchange(history=[row("a", (5, 5), sample=b"old"), row("b"), row("c")])
    history.keep_history([row("a", (7,)), row("b", ()), row("d", (), sample=b"note"), row("e", ())])
    assert history.history("task", MINUTE) == [
        row("a", (7,)),
        row("c"),
        row("d", (), sample=b"note"),
    ]
    worker.exchange(history=[row("a"), row("b", (3,))])
    assert history.history("task", MINUTE)[:2] == [row("a", (8,)), row("b", (3,))]


def test_the_last_of_two_kept_rows_stays(history: History) -> None:
    history.keep_history([row("a", (1,)), row("b"), row("a", (2,)), row("b", ())])
    history.keep_history([])
    assert history.history("task", MINUTE) == [row("a", (2,))]


def test_rows_are_deleted_when_their_time_is_over_and_notes_stay(
    broker: Store, history: History, worker: LiveOwner
) -> None:
    young = [row(span=span, at=NOW - keep + 24 * HOUR) for span, keep in KEEP.items()]
    old = [row(span=span, at=NOW - keep - HOUR) for span, keep in KEEP.items()]
    many = [row(f"n{n}", kind="queue", at=NOW - KEEP[MINUTE] - 60 * n - 60) for n in range(2100)]
    note = row(kind="mute", span=ALWAYS, at=0, sample=b"note")
    worker.exchange(history=[*young, *old])
    history.keep_history([*many, note, row(kind="queue")])

    for _ in range(3):
        broker.tick()

    assert history.history("task", MINUTE) == young[:1]
    assert history.history("task", HOUR) == young[1:]
    assert history.history("queue", MINUTE) == [row(kind="queue")]
    assert history.history("mute", ALWAYS) == [note]


@pytest.mark.needs(Feature.REMOTE_OWNERS)
def test_a_repeated_step_adds_once(broker: Store, history: History) -> None:
    broker.put([job()])
    guest = Guest(broker)
    (lease,) = guest.take()
    step = {"verdicts": [Verdict(lease.token, DONE)], "history": [row()]}
    assert guest.say(**step).settled == [True]
    assert guest.again(**step).settled == [True]
    assert history.history("task", MINUTE) == [row()]
    guest.say(history=[row()])
    assert history.history("task", MINUTE) == [row(counts=(2,))]


def test_an_owner_that_was_given_up_adds_nothing(
    broker: Store, history: History, worker: LiveOwner
) -> None:
    broker.put([job()])
    (lease,) = worker.take()
    LiveOwner(broker, "w2")
    broker.release(worker.id, None)
    reply = worker.exchange(verdicts=[Verdict(lease.token, DONE)], history=[row()])
    assert reply.settled == [False]
    assert history.history("task", MINUTE) == []


def test_a_store_that_departs_still_counts_and_keeps(
    need: Callable[[Feature], None], broker: Store, history: History, worker: LiveOwner
) -> None:
    need(Feature.MOVE)
    broker.put([job()])
    (lease,) = worker.take()
    broker.depart("lmdb://./elsewhere")
    assert worker.exchange(verdicts=[Verdict(lease.token, DONE)], history=[row()]).settled == [True]
    history.keep_history([row("b", (3,))])
    assert history.history("task", MINUTE) == [row(), row("b", (3,))]
    broker.depart("lmdb://./elsewhere", seal=True)
    history.keep_history([row("b", (4,))])
    assert history.history("task", MINUTE) == [row(), row("b", (4,))]
