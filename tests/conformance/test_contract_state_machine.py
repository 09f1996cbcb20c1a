"""Random moves on a broker and on the memory broker side by side: everything must agree.

Set ``TIDEMILL_EXAMPLES`` and ``TIDEMILL_STEPS`` for a deeper run than the everyday one.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from broker_driver import check_counts, everything, job, message, whole
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from kinds import KINDS, STILL, Clock, Kind
from servers import forget_served

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.limits import LimitCalls, with_limits
from tidemill.brokers.contract.schedules import Change
from tidemill.brokers.contract.store import Store
from tidemill.brokers.generic.purges import delete_waiting
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope, JobLimit, LimitSettings, Links, Unique, rank_of
from tidemill.core.job import Note, Outcome, Owner, Record, RunOn, Verdict
from tidemill.errors import TidemillError

ACTS: dict[str, Callable[[Store, list[str]], list[bool]]] = {
    "cancel": lambda broker, ids: broker.cancel(ids),
    "purge": lambda broker, ids: broker.cancel(ids, purge="p1"),
    "retry": lambda broker, ids: broker.retry(ids),
    "retry later": lambda broker, ids: broker.retry(ids, due=broker.wall() + 2.5),
    "delete": lambda broker, ids: broker.delete(ids),
}
QUEUES = ("a", "b")
SCHEDULES = ("s1", "s2", "s3")
OWNERS = ("worker-1", "worker-2", "consumer-1")
# The clocks all but stand still by themselves, and a little over whole seconds passes at a time: so
# what lasts whole seconds or halves is over at the same moves for every broker, however long a move
# really takes.
SPEED = STILL
OPTIONS = "keep=50.5&keep_count=4&keep_failed=80.5"

TERMS = (
    LimitSettings(),
    LimitSettings(concurrency=1),
    LimitSettings(concurrency=3),
    LimitSettings(rate=(1, 7.5), burst=1.01),
    LimitSettings(rate=(2, 34.6), burst=3.01, concurrency=2),
    LimitSettings(rate=(0, 1)),
    LimitSettings(window=(2, 25.5)),
)
BREAKERS = (LimitSettings(breaker=(1, 10.5)), LimitSettings(breaker=(2, 30.5), concurrency=2))
CLAIMS = [
    None,
    None,
    *(JobLimit("shared", "", 1.0, terms) for terms in TERMS[1:3]),
    *(JobLimit("keyed", key, cost, TERMS[4]) for key in "xy" for cost in (1.0, 2.0)),
    *(JobLimit("turns", key) for key in "xyz"),
]

UNIQUE = (None, None, Unique(30.5), Unique(0, 15.5), Unique(12.5, 5.5))

seconds = st.sampled_from([0.0, 0.0, 3.5, 10.5, 40.5])


class SideBySide(RuleBasedStateMachine):
    """The model is the memory broker; the subject is the class attribute ``kind``."""

    kind: Kind

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock(self.kind, self.patch, SPEED)
        self.dir = tempfile.mkdtemp()
        self.model: Broker = open_broker(f"memory://?{OPTIONS}")
        self.subject: Broker = open_broker(self.kind.store_url(self.dir, OPTIONS))
        self.ids = itertools.count(1)
        self.put_ids: list[str] = []
        self.tokens: list[tuple[str, int, int]] = []  # owner, token of the model, of the subject
        self.jobs_of: dict[int, str] = {}  # by token of the model
        self.steps = 0
        self.brokers = (self.model, self.subject)
        self.versions: list[list[int | None]] = []  # of the schedules, when somebody looked last

    def teardown(self) -> None:
        for broker in (self.model, self.subject):
            check_counts(broker)
            broker.close()
        forget_served(self.dir)
        self.patch.undo()
        shutil.rmtree(self.dir, ignore_errors=True)

    def both(self, call: Any) -> tuple[Any, Any]:
        """The same call on both; errors are replies, too: of several jobs any may be named."""
        replies = []
        for which, broker in enumerate((self.model, self.subject)):
            try:
                replies.append(call(broker, which))
            except TidemillError as error:
                replies.append((type(error), re.sub(r"\bj\d{5}\b", "…", str(error))))
        return replies[0], replies[1]

    def agree(self, call: Any) -> Any:
        one, two = self.both(call)
        assert one == two
        return one

    @initialize()
    def attach_all(self) -> None:
        for owner in OWNERS:
            self.agree(lambda b, _, o=owner: b.attach(Owner(id=o, kind=o.split("-")[0], name=o)))

    # -- moves ----------------------------------------------------------------------------------

    @rule(
        data=st.data(),
        count=st.sampled_from([1, 1, 1, 2, 3]),
        conflict=st.sampled_from(["keep", "reject", "replace", "merge"]),
    )
    def put(self, data: st.DataObject, count: int, conflict: str) -> None:
        jobs = [self.draw_job(data, conflict) for _ in range(count)]
        self.agree(lambda b, _: b.put(jobs))
        self.put_ids += [j.id for j in jobs]

    def draw_job(self, data: st.DataObject, conflict: str) -> Envelope:
        unique = data.draw(st.sampled_from(UNIQUE))
        if Feature.UNIQUE not in self.subject.features:
            unique = None
        old = bool(self.put_ids) and data.draw(st.integers(0, 9)) == 0
        job_id = data.draw(st.sampled_from(self.put_ids)) if old else f"j{next(self.ids):05}"
        make = data.draw(st.sampled_from([job, job, message]))
        fields: dict[str, Any] = {"task": ""} if make is message else {}
        if make is message:
            fields["ttr"] = data.draw(st.sampled_from([-1.0, 0.0, 5.5]))
        queue = data.draw(st.sampled_from(QUEUES))
        limit = data.draw(st.sampled_from(CLAIMS)) if self.limited else None
        if limit is not None and limit.key:
            # The first jobs of a key in two lines have the same turn, and no broker promises their
            # order in one merged take. So each line has keys of its own.
            limit = msgspec.structs.replace(limit, key=f"{limit.key} {queue} {make.__name__}")
        return job(
            queue,
            id=job_id,
            priority=data.draw(st.sampled_from([0, 0, 5, -5])),
            retries=data.draw(st.sampled_from([0, 1, 3])),
            delay=data.draw(seconds),
            expires=data.draw(st.sampled_from([0.0, 0.0, 0.0, 7.5, 20.5])),
            key=data.draw(st.sampled_from(["", "k", "k", "l"])),
            result_ttl=data.draw(st.sampled_from([-1.0, -1.0, -1.0, 15.5])),
            on_conflict=conflict,
            unique=unique,
            limit=limit,
            **fields,
        )

    @property
    def limited(self) -> bool:
        return Feature.LIMITS in self.subject.features

    @rule(
        name=st.sampled_from([*QUEUES, *QUEUES, "shared", "keyed", "turns"]),
        terms=st.sampled_from([*TERMS, *BREAKERS, LimitSettings(), None]),
        declared=st.booleans(),
    )
    def set_limit(self, name: str, terms: LimitSettings | None, declared: bool) -> None:
        if self.limited and (terms or not declared):
            queue = name in QUEUES
            how = {"queue": queue, "declared": declared}
            self.agree(lambda b, _: with_limits(b, "").set_limit(name, terms, **how))

    @rule(
        waits=st.lists(st.sampled_from(list(RunOn)), min_size=1, max_size=3),
        parents=st.integers(1, 3),
        held=st.booleans(),
        delay=st.sampled_from([0.0, 0.0, 3.5]),
        data=st.data(),
    )
    def put_flow(
        self, waits: list[RunOn], parents: int, held: bool, delay: float, data: st.DataObject
    ) -> None:
        """Some jobs, then a chain of such as wait; now and then with more to come before it."""
        if Feature.FLOWS not in self.subject.features:
            return
        chain = [f"j{next(self.ids):05}" for _ in waits]
        before = [f"j{next(self.ids):05}" for _ in range(parents)]
        behind = [
            Links(tuple(chain[n + 1 : n + 2]), waits[n], tuple(before[:2]) if n == 0 else ())
            for n in range(len(chain))
        ]
        late = [i for i in self.put_ids[-3:] if data.draw(st.integers(0, 5)) == 0]
        first = Links((chain[0], *late))
        jobs = [
            job("a", id=i, links=links, delay=delay)
            for i, links in reversed(list(zip(chain, behind, strict=True)))
        ]
        jobs += [job("b", id=i, links=first, retries=1) for i in before]
        self.agree(lambda b, _: b.put(jobs, hold=chain[:1] if held else ()))
        if held and data.draw(st.booleans()):
            self.agree(lambda b, _: b.put([], let_go=chain[:1]))
        self.put_ids += [*chain, *before]

    @property
    def scheduled(self) -> bool:
        return Feature.SCHEDULES in self.subject.features

    @rule(
        data=st.data(),
        names=st.lists(st.sampled_from(SCHEDULES), min_size=1, max_size=3),
        conflict=st.sampled_from(["keep", "reject", "replace"]),
    )
    def change_schedules(self, data: st.DataObject, names: list[str], conflict: str) -> None:
        """As somebody would who has just looked, or before the last change, or found none."""
        if not self.scheduled:
            return
        for owner in OWNERS:  # some brokers lease what fires at once to a worker that sleeps
            self.exchange(owner, lambda _, o=owner: Step(o, want=Want(0)))
        seen = [[s and s.version for s in b.schedules(SCHEDULES)] for b in self.brokers]
        stale = data.draw(st.integers(0, 4)) == 0 and self.versions
        versions = self.versions if stale else seen
        self.versions = seen
        wall = self.clock.wall()
        drawn = []
        for name in names:
            due = data.draw(st.sampled_from([0.0, wall - 5.5, wall + 3.5, wall + 12.5]))
            gone = data.draw(st.sampled_from([False, False, False, True]))
            count = data.draw(st.sampled_from([0, 1, 1, 2]))
            drawn.append((name, due, gone, [self.draw_job(data, conflict) for _ in range(count)]))

        def change(broker: Broker, which: int) -> list[Any]:
            known = dict(zip(SCHEDULES, versions[which], strict=True))
            made = broker.change_schedules(
                [
                    Change(name, known[name] or 0, due, name.encode(), gone, tuple(jobs))
                    for name, due, gone, jobs in drawn
                ]
            )
            return [(each.done, bool(each.version), each.left_out) for each in made]

        self.agree(change)
        self.put_ids += [j.id for *_, jobs in drawn for j in jobs]

    @rule(owner=st.sampled_from(OWNERS))
    def hand_out(self, owner: str) -> None:
        if self.scheduled:
            # All there are: which of several that are due come first is not promised.
            self.exchange(owner, lambda _: Step(owner, fires=len(SCHEDULES)))

    @rule(
        owner=st.sampled_from(OWNERS),
        count=st.integers(1, 4),
        mode=st.sampled_from([Mode.STRICT, Mode.MERGED]),
        queues=st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "a")]),
        kinds=st.sampled_from([(True, False), (False, True), (True, True)]),
        alone=st.booleans(),
    )
    def lease(
        self,
        owner: str,
        count: int,
        mode: Mode,
        queues: tuple[str, ...],
        kinds: tuple[bool, bool],
        alone: bool,
    ) -> None:
        want = Want(count, queues, mode, kinds[0], messages=kinds[1], alone=alone)
        self.exchange(owner, lambda _: Step(owner, want=want))

    def exchange(self, owner: str, step: Any) -> None:
        one, two = self.both(lambda b, which: b.exchange(step(which)))
        assert isinstance(one, Reply) is isinstance(two, Reply), (one, two)
        if not isinstance(one, Reply):
            assert one == two
            return
        assert (one.settled, one.touched) == (two.settled, two.touched)
        assert [c.verb for c in one.commands] == [c.verb for c in two.commands]
        assert sorted(s.name for s in one.schedules) == sorted(s.name for s in two.schedules)
        assert len(one.leases) == len(two.leases)
        for mine, theirs in zip(one.leases, two.leases, strict=True):
            assert mine.open() == theirs.open()
            same = ("attempt", "losses", "rank", "timeout", "deadline")
            assert [getattr(mine, f) for f in same] == [getattr(theirs, f) for f in same]
            assert mine.inputs == theirs.inputs
            self.tokens.append((owner, mine.token, theirs.token))
            self.jobs_of[mine.token] = mine.open().id

    def draw_token(self, data: st.DataObject) -> tuple[str, int, int] | None:
        """A lease, mostly a live one, now and then of another owner or long gone."""
        return data.draw(st.sampled_from(self.tokens[-6:])) if self.tokens else None

    @rule(
        data=st.data(),
        outcome=st.sampled_from(Outcome),
        delay=seconds,
        result=st.sampled_from([b"", b"r"]),
        stranger=st.integers(0, 9),
        follower=st.integers(0, 4),
        hold=st.sampled_from([False, False, True]),
        started=st.sampled_from([0.0, 1.0]),
    )
    def settle(
        self,
        data: st.DataObject,
        outcome: Outcome,
        delay: float,
        result: bytes,
        stranger: int,
        follower: int,
        hold: bool,
        started: float,
    ) -> None:
        token = self.draw_token(data)
        if token is None:
            return
        owner = OWNERS[stranger] if stranger < len(OWNERS) else token[0]
        followers = (self.draw_job(data, "keep"),) if follower == 0 else ()
        self.put_ids += [f.id for f in followers]

        def step(which: int) -> Step:
            verdict = Verdict(
                *(token[1 + which], outcome, result, delay, "why", "tb"),
                *(started, 2.0, followers, hold),
            )
            return Step(owner, verdicts=[verdict])

        self.exchange(owner, step)

    @rule(data=st.data(), longer=st.sampled_from([0.0, 2.5, 30.5]))
    def touch(self, data: st.DataObject, longer: float) -> None:
        if token := self.draw_token(data):
            self.exchange(token[0], lambda w: Step(token[0], touch=[(token[1 + w], longer)]))

    @rule(data=st.data(), done=st.sampled_from([-1.0, 0.5]), line=st.sampled_from(["", "text"]))
    def note(self, data: st.DataObject, done: float, line: str) -> None:
        if token := self.draw_token(data):
            self.exchange(
                token[0], lambda w: Step(token[0], notes=[Note(token[1 + w], done, 2.0, line, 3.0)])
            )

    @rule(data=st.data(), act=st.sampled_from(list(ACTS)))
    def act(self, data: st.DataObject, act: str) -> None:
        if self.put_ids:
            ids = data.draw(st.lists(st.sampled_from(self.put_ids[-12:]), min_size=1, max_size=3))
            self.agree(lambda b, _: ACTS[act](b, ids))

    @rule(
        data=st.data(),
        priority=st.sampled_from([None, 0, 5, -2.5]),
        queue=st.sampled_from([None, *QUEUES]),
    )
    def alter(self, data: st.DataObject, priority: float | None, queue: str | None) -> None:
        if self.put_ids and (priority is not None or queue is not None):
            ids = data.draw(st.lists(st.sampled_from(self.put_ids[-12:]), min_size=1, max_size=3))
            rank = None if priority is None else rank_of(priority)
            self.agree(lambda b, _: b.alter(ids, rank=rank, queue=queue))

    @rule(
        queue=st.sampled_from(QUEUES),
        how=st.sampled_from(["pause", "resume", "resume", "limit", "free", "free", "purge"]),
    )
    def meddle(self, queue: str, how: str) -> None:
        if how == "purge":
            self.agree(lambda b, _: delete_waiting(b, queue))
        elif how in ("pause", "resume"):
            self.agree(lambda b, _: b.set_queue(queue, paused=how == "pause"))
        else:
            self.agree(lambda b, _: b.set_queue(queue, max_size=3 if how == "limit" else 0))

    def attach(self, owner: str) -> None:
        self.agree(lambda b, _: b.attach(Owner(id=owner, kind=owner.split("-")[0], name=owner)))

    @rule(
        owner=st.sampled_from(OWNERS),
        witness=st.sampled_from(["some", "none", "absent", "not dead"]),
    )
    def die(self, owner: str, witness: str) -> None:
        if witness == "not dead":
            self.agree(lambda b, _: b.detach(owner))
            self.attach(owner)
            return
        mine = [t for t in self.tokens if t[0] == owner][-2:]

        def release(broker: Broker, which: int) -> int:
            causes = {t[1 + which]: "killed" for t in mine} if witness == "some" else {}
            return broker.release(owner, None if witness == "absent" else causes)

        self.agree(release)
        self.exchange(owner, lambda _: Step(owner, want=Want(1)))  # a ghost gets nothing
        self.attach(owner)

    @rule(by=st.sampled_from([1.01, 4.01, 12.01, 61.01]))
    def time_passes(self, by: float) -> None:
        self.clock.advance(by)

    # -- what must hold after every move ----------------------------------------------------------

    @invariant()
    def same_records_and_counters(self) -> None:
        self.agree(lambda b, _: b.tick())
        one, two = self.both(lambda b, _: everything(b))
        assert by_id(one) == by_id(two)
        one, two = whole(self.model, one), whole(self.subject, two)
        assert by_id(one) == by_id(two)
        self.agree(lambda b, _: [msgspec.structs.replace(row, oldest=0.0) for row in b.stats()])
        self.agree(lambda b, _: sorted(o.id for o in b.owners()))
        if self.scheduled:
            self.agree(lambda b, _: [(s.name, round(s.due), s.body) for s in b.list_schedules()])
        if self.limited:
            self.same_limits()
        for broker in (self.model, self.subject):
            check_counts(broker)

    def same_limits(self) -> None:
        """A server reads its clock later than a client does, by as long as a call took.

        So a bucket of the server may fill some milliseconds later; a real difference stays.
        """
        one, two = self.both(lambda b, _: self.limits(with_limits(b, "")))
        if one != two and self.clock.of_server:
            self.clock.advance(0.05)
        self.agree(lambda b, _: self.limits(with_limits(b, "")))

    def limits(self, broker: LimitCalls) -> Any:
        """Every limit, and what holds some jobs, without readings of a clock."""
        rows = [msgspec.structs.replace(row, until=float(row.until > 0)) for row in broker.limits()]
        ids = self.put_ids[-8:]
        held = [found for i in ids if (found := broker.held(i))]
        return rows, [msgspec.structs.replace(h, until=float(h.until < 1e9)) for h in held]


def by_id(records: list[Record]) -> dict[str, dict[str, Any]]:
    return {record.envelope.id: plain(record) for record in records}


_LOST_AFTER = re.compile(r"^lost after \S+ s")


def plain(record: Record) -> dict[str, Any]:
    """A record without what may differ: drawn numbers and clock readings."""
    shown = msgspec.structs.asdict(record)
    del shown["seq"]
    for when in ("due", "expires", "finished", "leased", "token", "lease_ends"):
        shown[when] = bool(shown[when])
    shown["log"] = [_LOST_AFTER.sub("lost", line) for _, line in record.log]
    shown["attempts"] = [
        (a.number, a.worker, a.outcome, a.error, a.traceback) for a in record.attempts
    ]
    return shown


SETTINGS = settings(
    stateful_step_count=int(os.environ.get("TIDEMILL_STEPS", "50")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking takes minutes, and the trace of a failure is there without.
    phases=[p for p in Phase if p is not Phase.shrink or "TIDEMILL_SHRINK" in os.environ],
)


@pytest.mark.needs(Feature.INSPECT)
@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.name)
def test_a_broker_behaves_as_the_memory_broker(kind: Kind) -> None:
    machine = type(f"SideBySide_{kind.name}", (SideBySide,), {"kind": kind})
    everyday = "30" if kind.name == "lmdb" else "12"  # a move takes ten times as long elsewhere
    examples = int(os.environ.get("TIDEMILL_EXAMPLES", everyday))
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=examples))
