"""The number of keys that one script on Redis touches is bounded, whatever the store holds."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import pytest
from moved_clock import MovedClock
from servers import Redis

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.generic.purges import purge, restore
from tidemill.brokers.redis import connections, record
from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.script_library import LIBRARY
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import clock, new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, State, Verdict
from tidemill.core.limit_settings import JobLimit, LimitSettings
from tidemill.core.owner import Owner
from tidemill.errors import InvalidOption

LATER = 60.0
ONE, TWO = LimitSettings(concurrency=1), LimitSettings(concurrency=2)

_COUNTER = b"""
local TOUCHED = {this = 0, most = 0}
function TOUCHED.size(reply)
  if type(reply) ~= 'table' then return 1 end
  local size = 0
  for _, part in ipairs(reply) do size = size + TOUCHED.size(part) end
  return size
end
function TOUCHED.call(...)
  local reply = redis.call(...)
  TOUCHED.this = TOUCHED.this + select('#', ...) + TOUCHED.size(reply)
  TOUCHED.most = math.max(TOUCHED.most, TOUCHED.this)
  return reply
end
"""
_READ = b"""
redis.register_function{function_name = '%s', flags = {'no-writes'}, callback = function()
  local most = TOUCHED.most
  TOUCHED.most = 0
  return most
end}
"""


class Counting:
    """The library, counting the arguments and the replies of all commands of a script."""

    def __init__(self) -> None:
        name = LIBRARY.name.encode()
        self._names = name, name + b"_counted"
        head, _, rest = LIBRARY.text(clock.wall()).replace(*self._names).partition(b"\n")
        begin = b"local function begin_lightly(keys, args)\n"
        assert begin in rest
        rest = rest.replace(begin, begin + b"  TOUCHED.this = 0\n")
        rest = rest.replace(b"unpk, sub, byte = redis.call,", b"unpk, sub, byte = TOUCHED.call,")
        self._text = head + b"\n" + _COUNTER + rest + _READ % self.function("touched")

    def text(self, _: float) -> bytes:
        return self._text

    def function(self, verb: str) -> bytes:
        return LIBRARY.function(verb).replace(*self._names) if verb != "touched" else b"touched"


class Counted:
    """A broker, and the most that one script has touched."""

    def __init__(self, broker: RedisBroker) -> None:
        self.broker = broker

    def most(self) -> int:
        return int(self.broker._lines.ask(b"FCALL_RO", b"touched", b"0"))

    def cost(self, call: Callable[[RedisBroker], object]) -> int:
        """Of the largest script of a call."""
        self.most()
        call(self.broker)
        return self.most()


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    """A server of these tests alone: other tests would load and count there too."""
    with contextlib.closing(Redis()) as server:
        yield server


@pytest.fixture
def make(server: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Counted]]:
    monkeypatch.setattr(connections, "LIBRARY", Counting())
    opened: list[RedisBroker] = []

    def make(options: str = "") -> Counted:
        broker = open_broker(f"{server.url}?prefix=t{new_id()}{options}")
        assert isinstance(broker, RedisBroker)
        opened.append(broker)
        broker.attach(Owner(id="w", name="w"))
        return Counted(broker)

    yield make
    for broker in opened:
        broker.close()


def put(broker: RedisBroker, count: int, prefix: str = "other", **fields: object) -> None:
    for start in range(0, count, 500):
        names = [f"{prefix}{n:05}" for n in range(start, min(start + 500, count))]
        broker.put([Envelope(id=n, task="t", **fields) for n in names])  # type: ignore[arg-type]


def put_keyed(
    broker: RedisBroker, count: int, terms: LimitSettings = ONE, prefix: str = "k"
) -> None:
    for n in range(0, count, 500):
        ids = range(n, min(n + 500, count))
        claims = [(f"{prefix}{i:05}", JobLimit("api", f"k{i:05}", 1.0, terms)) for i in ids]
        broker.put([Envelope(id=name, task="t", limit=claim) for name, claim in claims])


def take(broker: RedisBroker, count: int, *verdicts: Verdict) -> list[int]:
    return [lease.token for lease in broker.exchange(Step("w", verdicts, Want(count))).leases]


def scheduled_elsewhere(broker: RedisBroker, count: int) -> None:
    put(broker, count, delay=LATER, queue="others")
    put(broker, 20, "mine", queue="mine")
    put(broker, 20, "late", queue="mine", delay=LATER)


def keys_elsewhere(broker: RedisBroker, count: int) -> None:
    pairs = [part for n in range(count) for part in (b"k%d" % n, b"other00000\0")]
    broker._lines.ask(b"HSET", broker._lines.key + b":key", *pairs)
    put(broker, 1, queue="others")
    broker.put([Envelope(id="mine", task="t", queue="mine", delay=LATER)])


def scheduled_here(broker: RedisBroker, count: int) -> None:
    put(broker, count, delay=LATER, queue="mine")


def ready_here(broker: RedisBroker, count: int) -> None:
    put(broker, count, queue="mine")


def keyed_here(broker: RedisBroker, count: int) -> None:
    put_keyed(broker, count)


def queues(broker: RedisBroker, count: int) -> None:
    broker.put([Envelope(id=f"{n:05}", task="t", queue=f"q{n:05}") for n in range(count)])


def finished(broker: RedisBroker, count: int) -> None:
    put(broker, count)
    for _ in range(0, count, 500):
        tokens = take(broker, 500)
        take(broker, 0, *(Verdict(token, Outcome.SUCCESS) for token in tokens))


def finished_lanes(broker: RedisBroker, count: int) -> None:
    put_keyed(broker, count, LimitSettings(rate=(1, 1.0)))
    for _ in range(0, count, 500):
        tokens = take(broker, 500)
        take(broker, 0, *(Verdict(token, Outcome.SUCCESS) for token in tokens))


def purge_to_keep(queue: str = "mine") -> Callable[[RedisBroker], object]:
    return lambda broker: purge(broker, queue)


def purged_here(broker: RedisBroker, count: int) -> None:
    put(broker, count, queue="mine")
    purge(broker, "mine")


CASES: dict[str, tuple[Callable[[RedisBroker, int], None], Callable[[RedisBroker], object]]] = {
    "a purge beside scheduled jobs of others": (scheduled_elsewhere, purge_to_keep()),
    "a purge of scheduled jobs": (scheduled_here, purge_to_keep()),
    "a purge of keys of a limit": (keyed_here, purge_to_keep("default")),
    "a purge is restored": (purged_here, lambda b: restore(b, "mine")),
    "a limit changes": (keyed_here, lambda b: b.set_limit("api", TWO)),
    "a put changes a limit": (keyed_here, lambda b: put_keyed(b, 1, TWO, "new")),
    "limits are listed": (keyed_here, lambda b: b.limits()),
    "queues are listed": (queues, lambda b: b.stats()),
    "a lease among many queues": (queues, lambda b: take(b, 10)),
    "the first scheduled jobs": (scheduled_elsewhere, lambda b: b.head("mine", State.SCHEDULED, 5)),
    "jobs are cancelled": (ready_here, lambda b: b.cancel(f"other{n:05}" for n in range(4800))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_script_touches_no_more_in_a_larger_store(
    make: Callable[..., Counted], case: str
) -> None:
    # given a store, and one three times as large
    fill, call = CASES[case]
    costs = []
    for count in (1600, 4800):
        counted = make()
        fill(counted.broker, count)
        # when the same is done in each
        costs.append(counted.cost(call))
    # then the largest script is as large
    assert costs[1] <= 1.15 * costs[0], costs


def test_the_oldest_jobs_of_all_queues_are_sought_in_a_bounded_number_of_steps(
    make: Callable[..., Counted],
) -> None:
    # given 40 queues with 60 keys each, and one behind them with a job without a limit
    broker = make().broker
    for queue in (f"q{n:02}" for n in range(40)):
        claims = [JobLimit("api", f"k{i}", 1.0, ONE) for i in range(60)]
        ids = [f"{queue}-{i}" for i in range(60)]
        pairs = zip(ids, claims, strict=True)
        fields = {"task": "t", "queue": queue, "created": 1.0}
        broker.put([Envelope(id=i, limit=claim, **fields) for i, claim in pairs])  # type: ignore[arg-type]
    put(broker, 1, queue="z", created=2.0)
    # when they are listed
    broker._lines.ask(b"CONFIG", b"RESETSTAT")
    rows = {row.name: row for row in broker.stats()}
    # then the script takes few steps, and tells the oldest job that it saw
    found = re.search(rb"cmdstat_zrangebyscore:calls=(\d+)", broker._lines.ask(b"INFO", b"all"))
    assert found is not None
    assert int(found[1]) <= 1000
    assert (rows["q00"].oldest, rows["z"].oldest) == (1.0, 2.0)


@pytest.mark.parametrize("call", ["exchange", "tick", "put"])
def test_due_jobs_are_moved_in_pieces(
    make: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    costs = []
    for count in (1600, 4800):
        counted = make()
        put(counted.broker, count, delay=LATER)
        with monkeypatch.context() as patch:
            MovedClock(patch).advance(LATER + 1)
            calls: dict[str, Callable[[RedisBroker], object]] = {
                "exchange": lambda b: take(b, 10),
                "tick": lambda b: b.tick(),
                "put": lambda b: put(b, 1, "new", key="k"),
            }
            costs.append(counted.cost(calls[call]))
    assert costs[1] <= 1.15 * costs[0], costs


@pytest.mark.parametrize("fill", [finished, finished_lanes])
def test_jobs_are_pruned_in_pieces(
    make: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch, fill: Callable[..., None]
) -> None:
    # law 15
    costs = []
    for count in (1600, 4800):
        counted = make()
        fill(counted.broker, count)
        with monkeypatch.context() as patch:
            MovedClock(patch).advance(7200.0)
            costs.append(counted.cost(lambda broker: broker.tick()))
            assert counted.broker.info()["jobs"] == 0
    assert costs[1] <= 1.15 * costs[0], costs


def test_a_batch_larger_than_one_step_may_be_is_refused(
    make: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "PUT_MOST", 10)
    broker = make().broker
    put(broker, 10)
    with pytest.raises(InvalidOption, match="at most 10 jobs in one put, not 11; put them in"):
        put(broker, 11, "more")
    assert broker.info()["jobs"] == 10
