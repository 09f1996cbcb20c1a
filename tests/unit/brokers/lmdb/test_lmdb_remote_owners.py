"""Remote owners on an LMDB store whose server is killed. The processes are real."""

from __future__ import annotations

import resource
import threading
import time

import pytest
from harness import eventually
from lmdb_desk import Process, Sleeper, job
from moved_clock import MovedClock

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb import idempotency, store_clock, wakeup
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.core.errors import BrokerUnavailable
from tidemill.core.job import Outcome, State, Verdict
from tidemill.core.owner import Command, Owner

pytestmark = pytest.mark.everyday

# A server that dies after a commit, before it has answered.
DIES = """
        from tidemill.brokers.lmdb import group_commit
        def die_after_commit():
            def point(name):
                if name == "store.committed":
                    os.kill(os.getpid(), signal.SIGKILL)
            group_commit.point = point
"""


def guest(lease: float = 3600.0) -> Owner:
    return Owner(id="g", name="g", lease=lease)


def test_killed_between_commit_and_reply(url: str, broker: LmdbBroker) -> None:
    # laws 3, 4 and 5: what it held stays its own, and the step it never had an answer to is done
    broker.put([job(id=name) for name in "abcd"])
    code = (
        DIES
        + """
        broker.attach(Owner(id="g", name="g", lease=3600.0))
        leases = broker.exchange(Step("g", serial=1, want=Want(1))).leases
        say(leases[0].token)
        die_after_commit()
        done = [Verdict(leases[0].token, Outcome.SUCCESS, result=b"r")]
        broker.exchange(Step("g", serial=2, verdicts=done, want=Want(3)))
    """
    )
    with Process(url, code) as server:
        assert server.popen.stdout is not None
        token = int(server.popen.stdout.readline())
        assert server.popen.wait(60) == -9
    broker.tick()  # others look after the dead
    assert [broker.get(name).state for name in "abcd"] == [State.SUCCEEDED] + [State.RUNNING] * 3
    # when: a second server, to which it never attached
    verdicts = [Verdict(token, Outcome.SUCCESS, result=b"r")]
    reply = broker.exchange(Step("g", serial=2, verdicts=verdicts, want=Want(3)))
    # then
    assert reply.settled == [True]
    assert [lease.open().id for lease in reply.leases] == ["b", "c", "d"]
    assert len(broker.get("a").attempts) == 1
    # and the fence holds
    first = reply.leases[0]
    back = [Verdict(first.token, Outcome.RELEASE)]
    [again] = broker.exchange(Step("g", serial=3, verdicts=back, want=Want(1))).leases
    late = [Verdict(first.token, Outcome.SUCCESS)]
    assert broker.exchange(Step("g", serial=4, verdicts=late)).settled == [False]
    done = [Verdict(again.token, Outcome.SUCCESS)]
    assert broker.exchange(Step("g", serial=5, verdicts=done)).settled == [True]


def test_killed_and_never_heard_of_again(url: str, broker: LmdbBroker) -> None:
    # law 6: a loss each, after its lease, and not before somebody could hear it
    broker.put([job(id=name) for name in "abc"])
    code = """
        broker.attach(Owner(id="g", name="g", lease=0.5))
        say(len(broker.exchange(Step("g", serial=1, want=Want(3))).leases))
        time.sleep(60)
    """
    with Process(url, code) as server:
        server.expect("3")
        server.kill()
    time.sleep(1.0)
    broker.tick()
    assert [broker.get(name).state for name in "abc"] == [State.RUNNING] * 3
    end = time.monotonic() + 60
    while broker.owners():
        assert time.monotonic() < end
        time.sleep(min(0.1, broker.count_silence()))
    assert [broker.get(name).losses for name in "abc"] == [1, 1, 1]
    assert broker.exchange(Step("g", serial=2)).commands == [Command("lost")]


def test_a_put_whose_answer_died_with_the_server(url: str, broker: LmdbBroker) -> None:
    # law 11
    code = (
        DIES
        + """
        say("up")
        die_after_commit()
        broker.put([Envelope(id="a", queue="m")], nonce="n")
    """
    )
    with Process(url, code) as server:
        server.expect("up")
        assert server.popen.wait(60) == -9
    broker.delete(["a"])
    assert [put.id for put in broker.put([Envelope(id="a", queue="m")], nonce="n")] == ["a"]
    assert broker.get("a") is None


def test_a_hint_that_died_with_the_server_is_passed_on(url: str, broker: LmdbBroker) -> None:
    # law 9: it went to an owner elsewhere; who makes that one's calls next passes it on
    code = """
        broker.attach(Owner(id="g", name="g", lease=3600.0))
        broker.exchange(Step("g", serial=1, want=Want(1)))
        say("asleep")
        time.sleep(60)
    """
    with Process(url, code) as server:
        server.expect("asleep")
        other = Sleeper(broker)
        other.sleep()
        broker.put([job(id="a")])
        assert not other.hinted()
        server.kill()
    broker.wait("g", 0.0)
    assert other.hinted()


def test_no_word_is_lost_to_a_machine_that_boots(
    url: str, broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # law 19: store time goes on, and a lease begins anew
    broker.put([job(id="a")])
    broker.attach(guest(lease=5.0))
    [lease] = broker.exchange(Step("g", serial=1, want=Want(1))).leases
    broker.tick()
    broker.close()
    monkeypatch.setattr(store_clock, "_boot_id", lambda: "another")
    MovedClock(monkeypatch, machine=12.0)
    after = open_broker(url)
    after.tick()
    after.count_silence()
    assert [owner.id for owner in after.owners()] == ["g"]
    again = after.exchange(Step("g", serial=1, want=Want(1)))
    assert [one.token for one in again.leases] == [lease.token]
    after.close()


def test_answers_to_old_puts_are_forgotten(
    broker: LmdbBroker, monkeypatch: pytest.MonkeyPatch, moved_clock: MovedClock
) -> None:
    # law 15: in pieces, the oldest first
    monkeypatch.setattr(idempotency, "_SWEEP_MOST", 3)
    for number in range(10):
        broker.put([job()], nonce=f"old{number}")
    moved_clock.advance(3000)
    broker.put([job()], nonce="new")
    broker.tick()
    with broker._store.env.begin() as txn:
        keys = [bytes(key) for key, _ in txn.cursor(broker._store.tables.said)]
    assert [key[5:] for key in keys] == [b"new"]


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 700, reason="too few descriptors"
)
def test_two_hundred_may_wait_in_one_process(broker: LmdbBroker) -> None:
    """They cost nothing while nothing happens, and a put wakes one."""
    names = [f"g{number}" for number in range(200)]
    for name in names:
        broker.attach(Owner(id=name, name=name, lease=3600.0))
    got: list[str] = []
    over = threading.Event()

    def serve(name: str) -> None:
        serial = 0
        while not over.is_set():
            try:
                reply = broker.exchange(Step(name, serial=serial + 1, want=Want(1)))
            except BrokerUnavailable:  # the machine is busy: a worker tries again, too
                continue
            serial += 1
            got.extend(lease.open().id for lease in reply.leases)
            broker.wait(name, 600.0)

    threads = [threading.Thread(target=serve, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        _settle_down(broker, names)
        before = time.process_time()
        time.sleep(3.0)
        idle = time.process_time() - before
        broker.put([job(id="a")])
        end = time.monotonic() + 60
        while got != ["a"]:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        over.set()
        for name in names:
            broker.wake(name)
        for thread in threads:
            thread.join(60)
    assert idle < 0.3, f"{idle:.2f} s of processor in 3 s"


def test_remote_owners_attach_in_one_group_commit(broker: LmdbBroker) -> None:
    """A crowd that attaches does not keep a put waiting for a commit of each."""
    names = [f"g{number}" for number in range(20)]

    def attach(name: str) -> None:
        broker.attach(Owner(id=name, name=name, lease=3600.0))

    threads = [threading.Thread(target=attach, args=(name,)) for name in names]
    # given a store that another writer holds until all owners wait for their commit
    with broker._store.env.begin(write=True) as txn:
        for thread in threads:
            thread.start()
        eventually(lambda: len(broker._store.commits.pending) == len(names), "all wait")
        before = broker._store.env.info()["last_txnid"]
        txn.abort()
    # when
    for thread in threads:
        thread.join(60)
    # then: each owner needs two commits, and all share the first one
    assert broker._store.env.info()["last_txnid"] - before < 2 * len(names)
    assert {owner.id for owner in broker.owners()} == set(names)


def _settle_down(broker: LmdbBroker, names: list[str]) -> None:
    """Until all are in their wait."""
    wakeups, end = broker._store.wakeups, time.monotonic() + 60
    slots = [broker._owners[name].sleeper.slot for name in names]
    while not all(wakeups._map[slot * wakeup._SIZE + wakeup._WAITS] for slot in slots):
        assert time.monotonic() < end
        time.sleep(0.05)
