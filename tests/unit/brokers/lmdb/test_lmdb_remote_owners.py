"""Remote owners on an LMDB store: their server is killed."""

from __future__ import annotations

import time

import pytest
from lmdb_desk import Process, Sleeper, job
from moved_clock import MovedClock

from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.lmdb.broker import LmdbBroker
from tidemill.brokers.lmdb.engine import store
from tidemill.brokers.registry import open_broker
from tidemill.core.envelope import Envelope
from tidemill.core.job import Command, Outcome, Owner, State, Verdict

pytestmark = pytest.mark.everyday

# A server that dies after a commit, before it has answered.
DIES = """
        from tidemill.core import crash_points
        def die_after_commit():
            crash_points._NAME = "store.committed"
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
    monkeypatch.setattr(store, "_boot_id", lambda: "another")
    MovedClock(monkeypatch, machine=12.0)
    after = open_broker(url)
    after.tick()
    after.count_silence()
    assert [owner.id for owner in after.owners()] == ["g"]
    again = after.exchange(Step("g", serial=1, want=Want(1)))
    assert [one.token for one in again.leases] == [lease.token]
    after.close()
