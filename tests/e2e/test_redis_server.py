"""A Redis server that is killed, forgetful, full, read-only, locked or empty of functions."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import LIMIT, Place, check_counters, eventually, open_place, runs_of
from servers import Redis

from tidemill import Tidemill
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.core.job import Outcome, Owner, State, Verdict
from tidemill.errors import BrokerUnavailable, StoreFull

APP = """
@mill.task(retries=Retries(3, delay=0))
def brief(n): begin(); time.sleep(0.02); end(); return n

@mill.task
def silent(n): pass

@mill.task
def waits():
    begin()
    while not os.path.exists(HERE + "/go"):
        time.sleep(0.01)
    end()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., Redis]]:
    with contextlib.ExitStack() as stack:

        def start_one(*options: str, durable: bool = False) -> Redis:
            return stack.enter_context(contextlib.closing(Redis(*options, durable=durable)))

        yield start_one


@pytest.fixture
def place_on(tmp_path: Path) -> Iterator[Callable[[str], Place]]:
    with contextlib.ExitStack() as stack:

        def open_one(url: str) -> Place:
            (tmp_path / "p").mkdir()
            place = stack.enter_context(open_place(tmp_path / "p", url))
            place.write(APP)
            return place

        yield open_one


@pytest.mark.everyday
def test_killed_in_the_middle_with_aof_always_nothing_is_lost(
    start: Callable[..., Redis], place_on: Callable[[str], Place]
) -> None:
    # laws 1, 3, 4: whoever waits goes on by itself
    server = start(durable=True)
    place = place_on(f"{server.url}?patience=20")
    worker = place.worker(processes=2, slots=3).wait_ready()
    held = place.enqueue("waits")
    place.wait_notes(f"begin {held.id}")
    jobs = list(place.enqueue_many("brief", [(n,) for n in range(100)]))
    for _ in range(3):
        time.sleep(0.3)
        server.kill()
        putting: list[object] = []
        producer = threading.Thread(target=lambda: putting.append(place.enqueue("brief", -1)))  # noqa: B023
        producer.start()  # it waits for the server
        time.sleep(0.3)
        server.start()
        producer.join(LIMIT)
        jobs += putting
    (place.path / "go").touch()
    records = place.finish([*jobs, held], 60)
    assert len(records) == 104
    assert {(r.state, r.attempt, r.losses) for r in records} == {(State.SUCCEEDED, 1, 0)}
    assert {len(runs) for runs in runs_of(place.ledger()).values()} == {1}
    check_counters(place)
    assert worker.stop() == 0
    assert "begins anew" not in worker.output


def test_without_aof_the_worker_begins_anew_and_says_so(
    start: Callable[..., Redis], place_on: Callable[[str], Place]
) -> None:
    # law 1, as far as the server keeps it
    server = start()
    place = place_on(server.url)
    worker = place.worker(slots=3).wait_ready()
    held = place.enqueue("waits")
    place.wait_notes(f"begin {held.id}")
    server.kill()
    server.start()
    worker.wait_line("begins anew")
    worker.wait_line("another store is in its place: the append-only file is off")
    (place.path / "go").touch()
    place.wait_notes(f"end {held.id}")
    assert place.mill.broker.get(held.id) is None
    jobs = place.enqueue_many("brief", [(n,) for n in range(5)])
    assert [job.result(LIMIT) for job in jobs] == list(range(5))
    assert [owner.kind for owner in place.mill.broker.owners()] == ["worker"]
    assert worker.stop() == 0


def test_functions_that_are_gone_are_loaded_again(
    start: Callable[..., Redis], place_on: Callable[[str], Place]
) -> None:
    server = start()
    place = place_on(server.url)
    place.worker(slots=3).wait_ready()
    for n in range(5):
        server.run("FUNCTION", "FLUSH")
        server.run("SCRIPT", "FLUSH")
        assert place.enqueue("brief", n).result(LIMIT) == n


def test_libraries_of_earlier_versions_are_removed_after_a_day(start: Callable[..., Redis]) -> None:
    server = start()
    hour_ago = f"{time.time() - 3600:.0f}"
    two_days_ago = f"{time.time() - 2 * 86400:.0f}"
    for name, description in (
        ("tidemill_first", ""),  # of a version that did not tell when it was loaded
        ("tidemill_old", two_days_ago),
        ("tidemill_young", hour_ago),
        ("others", ""),
    ):
        said = f"description = '{description}', " if description else ""
        server.run(
            "FUNCTION",
            "LOAD",
            f"#!lua name={name}\nredis.register_function{{function_name = '{name}_loaded', "
            f"{said}callback = function() return 1 end}}",
        )
    # when
    broker = open_broker(server.url)
    # then
    [ours] = libraries(server) - {"tidemill_young", "others"}
    assert libraries(server) == {ours, "tidemill_young", "others"}
    # and a process that still uses a removed one loads it again, and removes nothing
    server.run("FUNCTION", "DELETE", ours)
    broker.put([Envelope(id="a", task="t")])
    assert libraries(server) == {ours, "tidemill_young", "others"}
    broker.close()


def libraries(server: Redis) -> set[str]:
    lines = server.run("FUNCTION", "LIST").splitlines()
    return {name for before, name in itertools.pairwise(lines) if before == "library_name"}


@pytest.mark.everyday
def test_a_full_server_refuses_puts_and_settles_what_is_there(
    start: Callable[..., Redis], place_on: Callable[[str], Place]
) -> None:
    # law 16, case Q10
    server = start("--maxmemory", "6mb")
    place = place_on(f"{server.url}?keep=0&patience=0")
    place.enqueue("silent", 0)
    accepted = 1
    while accepts(place, 100):
        accepted += 100
    assert len(place.records()) == accepted  # nothing partial
    while accepts(place):  # what a large call needs on its way leaves room for small ones
        pass
    count = len(place.records())
    # then: what is there can be leased, settled and pruned
    place.worker(slots=8)
    eventually(lambda: len(place.records()) < count - 100, "it drains", 60)
    eventually(lambda: accepts(place), "puts are accepted again", 60)


def test_a_full_server_refuses_a_step_once_however_many_results_it_has(
    start: Callable[..., Redis],
) -> None:
    # law 16
    server = start()
    broker = open_broker(f"{server.url}?patience=0")
    broker.attach(Owner(id="o", name="w"))
    broker.put([Envelope(id=f"{n}", task="t", body=b"") for n in range(100)])
    leases = broker.exchange(Step("o", want=Want(100))).leases
    verdicts = [Verdict(lease.token, Outcome.SUCCESS, b"x" * 10_000) for lease in leases]
    server.run("CONFIG", "SET", "maxmemory", "1")
    # when the worker hands in 100 large results
    reply = broker.exchange(Step("o", verdicts))
    # then the server refuses the step once, and settles them all
    assert reply.settled == [True] * 100
    assert "errorstat_OOM:count=1\r" in server.run("INFO", "errorstats") + "\r"
    assert {r.state for r in broker.find(Filter(), 1000).records} == {State.SUCCEEDED}
    broker.close()


def accepts(place: Place, count: int = 1) -> bool:
    try:
        place.enqueue_many("silent", [(n,) for n in range(count)], headers={"h": "x" * 500})
    except StoreFull:
        return False
    return True


def test_a_replica_is_refused_by_name(start: Callable[..., Redis]) -> None:
    server = start()
    broker = open_broker(f"{server.url}?patience=0")
    job = Envelope(id="a", task="t")
    server.run("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(BrokerUnavailable, match="read-only replica; name its master"):
        broker.put([job])
    assert broker.get("a") is None  # looking is allowed
    server.run("REPLICAOF", "NO", "ONE")
    eventually(lambda: puts(broker, job), "it is a master again")
    broker.close()


def puts(broker: object, job: Envelope) -> bool:
    try:
        broker.put([job])  # type: ignore[attr-defined]
    except BrokerUnavailable:
        return False
    return True


@pytest.mark.parametrize(
    ("login", "sentence"),
    [("", "wants a password"), ("me:wrong@", "refuses the"), (":x@", "refuses")],
)
def test_a_wrong_password_is_one_sentence_and_never_shown(
    start: Callable[..., Redis], login: str, sentence: str
) -> None:
    server = start("--requirepass", "hush-hush")
    with pytest.raises(BrokerUnavailable, match=sentence) as caught:
        open_broker(f"redis://{login}127.0.0.1:{server.port}/0")
    assert "\n" not in str(caught.value)
    assert "wrong" not in str(caught.value)
    url = f"redis://:hush-hush@127.0.0.1:{server.port}/0"
    with Tidemill(url) as mill:
        mill.queue("q").put(1)
        assert mill.url == url
        for shown in (mill.broker.url, str(mill.broker.info())):
            assert "hush" not in shown
            assert "***" in shown


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis://127.0.0.1:1/0?patience=0", "cannot reach redis at 127.0.0.1:1"),
        ("redis://127.0.0.1:{port}/77?patience=0", "database number"),
    ],
)
def test_an_unreachable_server_is_one_sentence(
    start: Callable[..., Redis], url: str, sentence: str
) -> None:
    server = start() if "{port}" in url else None
    began = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=sentence) as caught:
        open_broker(url.format(port=server.port if server else 0))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 15


def test_info_says_what_its_settings_mean(start: Callable[..., Redis]) -> None:
    for options, durable, words in (
        ((), False, "append-only file is off"),
        (("--appendonly", "yes"), True, "may lose the jobs of the last second"),
        (("--appendonly", "yes", "--appendfsync", "always"), True, "survive a power cut"),
        (
            ("--appendonly", "yes", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"),
            False,
            "may throw jobs away",
        ),
    ):
        server = start(*options)
        broker = open_broker(server.url)
        info = broker.info()
        assert info["durable"] is durable
        assert words in info["durability"]
        assert ("durability_advice" in info) is not durable
        broker.close()
        server.close()
