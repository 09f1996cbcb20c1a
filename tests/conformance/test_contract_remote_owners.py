"""Remote owners: each call that a server makes for them is done once, and outlives the server."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from broker_driver import LiveOwner, job, message, state
from kinds import Clock, Kind

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Reply, Step, Want
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Command, Lease, Outcome, Owner, Placed, State, Verdict
from tidemill.errors import DuplicateJob, InvalidOption, TidemillError

pytestmark = pytest.mark.needs(Feature.REMOTE_OWNERS)

LONG = 3600.0


class Guest:
    """An owner elsewhere, whose calls somebody makes for it."""

    def __init__(self, broker: Broker, lease: float = LONG, kind: str = "worker") -> None:
        self.broker = broker
        self.owner = Owner(id=f"g-{new_id()}", kind=kind, name="g1", lease=lease)
        self.serial = 0
        broker.attach(self.owner)

    @property
    def id(self) -> str:
        return self.owner.id

    def say(self, **step: Any) -> Reply:
        """The next step."""
        self.serial += 1
        return self.again(**step)

    def again(self, **step: Any) -> Reply:
        """The last step once more."""
        return self.broker.exchange(Step(self.id, serial=self.serial, **step))

    def take(self, count: int = 1) -> list[Lease]:
        return self.say(want=self.want(count)).leases

    def want(self, count: int = 1) -> Want:
        consumer = self.owner.kind == "consumer"
        return Want(count, tasks=not consumer, messages=consumer)

    def settle(self, lease: Lease, outcome: Outcome = Outcome.SUCCESS) -> bool:
        return self.say(verdicts=[Verdict(lease.token, outcome)]).settled[0]


def until(holds: Callable[[], object], limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not holds():
        assert time.monotonic() < end, f"not within {limit:g} s"
        time.sleep(0.02)


# -- a store that has lost steps -----------------------------------------------------------------


@pytest.mark.needs(Feature.DURABLE)  # memory ends with its owners
def test_a_step_after_lost_ones_is_told_so(broker: Broker) -> None:
    guest = Guest(broker)
    assert not guest.say().behind
    guest.serial += 1  # a step that the store answered, and forgot when a replica took over
    assert guest.say().behind
    assert not guest.say().behind


@pytest.mark.needs(Feature.DURABLE)  # memory ends with its owners
def test_leases_that_the_owner_does_not_hold_are_strays_until_they_are_settled(
    broker: Broker,
) -> None:
    # law 4: their job would be running for the life of the owner
    jobs = [job() for _ in range(4)]
    broker.put(jobs)
    guest = Guest(broker)
    first, second, third = guest.take(3)
    other = Guest(broker).take(1)
    assert guest.say().strays == []
    # when
    reply = guest.say(held=[second.token, 10**9], want=guest.want(1))
    # then: nothing is done to them
    assert sorted(reply.strays) == sorted([first.token, third.token])
    assert [row.running for row in broker.stats()] == [4]
    assert other
    verdicts = [Verdict(first.token, Outcome.SUCCESS), Verdict(third.token, Outcome.RELEASE)]
    reply = guest.say(held=[second.token, first.token, third.token], verdicts=verdicts)
    assert (reply.settled, reply.strays) == ([True, True], [])
    assert guest.say(held=[second.token]).strays == []
    assert state(broker, jobs[0].id) is State.SUCCEEDED
    assert state(broker, jobs[2].id) is State.READY


# -- a step that comes twice ---------------------------------------------------------------------


def test_a_repeated_step_is_answered_and_not_done_again(broker: Broker) -> None:
    # law 4: the reply was lost on its way
    jobs = [job(retries=0) for _ in range(5)]
    broker.put(jobs)
    guest = Guest(broker)
    first, second = guest.take(2)
    follower = job()
    step = {
        "verdicts": [
            Verdict(first.token, Outcome.SUCCESS, result=b"r", followers=(follower,)),
            Verdict(10**9, Outcome.SUCCESS),
        ],
        "touch": [(second.token, 0.0), (10**9, 0.0)],
        "want": guest.want(2),
    }
    reply = guest.say(**step)
    assert (reply.settled, reply.touched) == ([True, False], [True, False])
    third, fourth = reply.leases
    # when
    again = guest.again(**step)
    # then
    assert (again.settled, again.touched) == ([True, False], [True, False])
    assert again.leases == [third, fourth]
    record = broker.get(jobs[0].id)
    assert (record.state, len(record.attempts)) == (State.SUCCEEDED, 1)
    assert [row.running for row in broker.stats()] == [3]
    assert guest.take(9)[-1].open().id == follower.id


def test_a_lease_lost_meanwhile_is_not_handed_out_again(broker: Broker) -> None:
    # law 4
    jobs = [job() for _ in range(3)]
    broker.put(jobs)
    guest = Guest(broker)
    leases = guest.take(3)
    broker.delete([jobs[1].id])
    assert guest.again(want=guest.want(3)).leases == [leases[0], leases[2]]


def test_only_the_last_step_can_be_repeated(broker: Broker) -> None:
    # law 4: a request that was stuck on its way comes after later ones
    broker.put([job() for _ in range(3)])
    guest = Guest(broker)
    [lease] = guest.take()
    assert guest.settle(lease)
    guest.serial -= 1
    with pytest.raises(TidemillError, match="late"):
        guest.again(want=guest.want(2))
    guest.serial += 2
    assert guest.again().settled == []
    assert [row.running for row in broker.stats()] == [0]


def test_a_command_of_a_lost_reply_is_told_again(broker: Broker) -> None:
    # law 14
    given = job()
    broker.put([given])
    guest = Guest(broker)
    [lease] = guest.take()
    broker.cancel([given.id])
    told = [Command("cancel", lease.token)]
    assert guest.say().commands == told
    assert guest.again().commands == told
    assert guest.say().commands == []


def test_a_step_without_effect_may_be_repeated_too(broker: Broker) -> None:
    guest = Guest(broker)
    assert guest.say(want=guest.want(1)).leases == []
    broker.put([job()])
    # then: what it still lacks, it may get, but only once
    again = guest.again(want=guest.want(1))
    assert guest.again(want=guest.want(1)).leases == again.leases
    assert len(again.leases) + len(guest.take()) == 1


@pytest.mark.parametrize("serials", [True, False])
def test_a_step_on_behalf_is_no_sign_of_life(broker: Broker, serials: bool) -> None:
    """Its clients settle through another server what they were given here, and it goes on."""
    # laws 4 and 14
    given = [message(ttr=60.0) for _ in range(4)]
    broker.put(given)
    guest = Guest(broker, kind="consumer")

    def say(**step: Any) -> Reply:
        return guest.say(**step) if serials else broker.exchange(Step(guest.id, **step))

    acked, touched, kept = say(want=guest.want(3)).leases
    assert broker.command(guest.id, Command("stack"))
    # when
    behalf = Step(
        guest.id,
        [Verdict(acked.token, Outcome.SUCCESS), Verdict(10**9, Outcome.SUCCESS)],
        touch=[(touched.token, 900.0), (10**9, 0.0)],
        behalf=True,
    )
    reply = broker.exchange(behalf)
    # then
    assert (reply.settled, reply.touched) == ([True, False], [True, False])
    assert (reply.leases, reply.commands) == ([], [])
    assert broker.exchange(behalf).settled == [False, False]
    assert broker.get(given[0].id) is None
    if serials:  # the last step is still the one that leased
        assert guest.again(want=guest.want(3)).leases[-1].token == kept.token
    reply = say(want=guest.want(1))
    assert reply.commands == [Command("stack")]
    assert [lease.open().id for lease in reply.leases] == [given[3].id]
    assert say(verdicts=[Verdict(kept.token, Outcome.SUCCESS)]).settled == [True]
    # and who is not on the list has lost it
    broker.release(guest.id, None)
    assert broker.exchange(behalf).settled == [False, False]


def test_a_step_without_a_serial_is_never_a_repetition(broker: Broker, worker: LiveOwner) -> None:
    broker.put([job() for _ in range(2)])
    assert len(worker.take()) == len(worker.take()) == 1


# -- an owner of no process ----------------------------------------------------------------------


def test_to_attach_once_more_is_to_go_on(broker: Broker) -> None:
    # law 5: its server was started again, or the reply to its attach was lost
    broker.put([job() for _ in range(3)])
    guest = Guest(broker)
    [lease] = guest.take()
    # when
    broker.attach(guest.owner)
    # then
    assert [owner.id for owner in broker.owners()] == [guest.id]
    assert guest.again(want=guest.want(1)).leases == [lease]
    assert guest.settle(lease)


def test_closing_a_broker_keeps_a_remote_owner_listed(
    kind: Kind, tmp_path: Path, broker: Broker, open_store: Callable[..., Broker]
) -> None:
    # law 5: the server is stopped, and another started
    if Feature.PROCESSES not in broker.features:
        pytest.skip("nobody else can open it")
    given = [job() for _ in range(3)]
    broker.put(given)
    server = open_broker(kind.store_url(tmp_path))
    guest = Guest(server)
    [lease] = guest.take()
    server.close()
    assert state(broker, given[0].id) is State.RUNNING
    # when: it never attaches anew
    guest.broker = open_store()
    again = guest.again(want=guest.want(1))
    # then
    assert again.leases == [lease]
    assert guest.settle(lease)
    assert [owner.id for owner in broker.owners()] == [guest.id]
    guest.broker.detach(guest.id)
    assert broker.owners() == []


def test_two_servers_may_serve_a_remote_owner_in_turn(
    broker: Broker, open_store: Callable[..., Broker]
) -> None:
    # its requests go now to the one, now to the other
    if Feature.PROCESSES not in broker.features:
        pytest.skip("nobody else can open it")
    servers = [broker, open_store()]
    guest, tokens = Guest(broker), []
    for turn in range(8):
        guest.broker = servers[turn % 2]
        broker.put([job()])
        reply = guest.say(want=guest.want(1))
        tokens += [lease.token for lease in reply.leases]
        assert guest.again(want=guest.want(1)).leases == reply.leases
    assert len(set(tokens)) == len(tokens) == 8
    assert [row.running for row in broker.stats()] == [8]


def test_a_remote_owner_is_hinted_at_its_last_server(
    broker: Broker, open_store: Callable[..., Broker]
) -> None:
    # law 9
    if Feature.PROCESSES not in broker.features:
        pytest.skip("nobody else can open it")
    other = open_store()
    guest = Guest(broker)
    guest.take()
    guest.broker = other
    other.wait(guest.id, 0.0)
    guest.take()  # asleep there, and awake here
    woken = threading.Event()

    def sleep() -> None:
        while not guest.take():
            other.wait(guest.id, 60.0)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        broker.put([job()])
        assert woken.wait(30)
    finally:
        broker.put([job()])
        thread.join(60)


def test_an_owner_attached_anew_at_one_server_is_kept_by_the_other(
    broker: Broker, open_store: Callable[..., Broker]
) -> None:
    # law 5: the other has made its calls before, and has not counted the silence since
    if Feature.PROCESSES not in broker.features:
        pytest.skip("nobody else can open it")
    other = open_store()
    guest = Guest(other)
    guest.take()
    guest.broker = broker
    broker.release(guest.id, None)
    assert guest.say().commands == [Command("lost")]
    broker.attach(guest.owner)
    broker.put([job(), job()])
    [first] = guest.take()
    # when
    guest.broker = other
    [second] = guest.take()
    # then
    assert guest.settle(first)
    other.wait(guest.id, 0.0)
    guest.broker = broker
    assert guest.settle(second)


def test_a_step_of_another_server_that_wants_nothing_leaves_it_asleep(
    broker: Broker, open_store: Callable[..., Broker]
) -> None:
    # law 9: it settles what it holds through the other, and sleeps on here
    if Feature.PROCESSES not in broker.features:
        pytest.skip("nobody else can open it")
    other = open_store()
    guest = Guest(broker)
    broker.wait(guest.id, 0.0)
    guest.take()
    # when
    guest.broker = other
    assert guest.say(touch=[(1, 0.0)]).touched == [False]
    broker.wait(guest.id, 0.3)
    other.put([job()])
    # then
    broker._next_tick = time.monotonic() + LONG  # type: ignore[attr-defined]
    began = time.monotonic()
    broker.wait(guest.id, 60.0)
    assert time.monotonic() - began < 30


def test_detach_gives_back_uncounted_wherever_it_is_called(
    broker: Broker, open_store: Callable[..., Broker]
) -> None:
    given = job()
    broker.put([given])
    guest = Guest(broker)
    guest.take()
    server = open_store() if Feature.PROCESSES in broker.features else broker
    server.detach(guest.id)
    record = broker.get(given.id)
    assert (record.state, record.attempt, record.losses) == (State.READY, 0, 0)
    server.detach(guest.id)


def test_its_wait_returns_in_time_for_its_next_word(broker: Broker) -> None:
    guest = Guest(broker, lease=1.5)
    guest.take()
    began = time.monotonic()
    broker.wait(guest.id, LONG)
    assert time.monotonic() - began < 60


def test_a_given_up_owner_leaves_nothing_behind(broker: Broker) -> None:
    """No descriptor, or a server would have none left one day. Who waits for it comes back."""
    if Feature.PROCESSES not in broker.features:
        pytest.skip("it lives no longer than its server")
    stays = Guest(broker)
    stays.take()
    broker.count_silence()
    before = len(os.listdir("/proc/self/fd"))
    guests = [Guest(broker) for _ in range(8)]
    for guest in guests:
        guest.take()
    returned = threading.Event()

    def sleep() -> None:
        with contextlib.suppress(TidemillError):  # it is forgotten by now
            while guests[0].id in [owner.id for owner in broker.owners()]:
                broker.wait(guests[0].id, 60.0)
        returned.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    # when
    for guest in guests[:6]:
        broker.release(guest.id, None)
    broker.detach(guests[6].id)
    broker.detach(guests[7].id)

    def forgotten() -> bool:
        broker.count_silence()
        return len(os.listdir("/proc/self/fd")) < before + 4  # its own lines come and go

    until(forgotten)
    # then
    assert returned.wait(30)
    thread.join(30)
    broker.count_silence()
    with pytest.raises(TidemillError, match="not attached"):
        broker.wait(guests[0].id, 0.0)
    assert guests[0].say().commands == [Command("lost")]
    # and begins anew
    broker.attach(guests[0].owner)
    broker.put([job()])
    assert len(guests[0].take()) == 1
    broker.wait(guests[0].id, 0.0)


def test_leaving_ends_a_wait_in_another_thread(broker: Broker) -> None:
    # its server is in its wait as long as it is up
    if Feature.PROCESSES not in broker.features:
        pytest.skip("it lives no longer than its server")
    for _ in range(20):
        guest = Guest(broker)
        guest.take()
        begun, trouble = threading.Event(), []

        def sleep(owner_id: str, begun: threading.Event, trouble: list[Exception]) -> None:
            try:
                begun.set()
                broker.wait(owner_id, 60.0)
            except TidemillError:
                pass  # it had left before
            except Exception as error:
                trouble.append(error)

        thread = threading.Thread(target=sleep, args=(guest.id, begun, trouble))
        thread.start()
        assert begun.wait(30)
        broker.detach(guest.id)
        thread.join(30)
        assert (thread.is_alive(), trouble) == (False, [])


# -- anything at any moment ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_each_job_runs_once_whatever_is_lost(
    broker: Broker, open_store: Callable[..., Broker], seed: int
) -> None:
    """Replies and servers are lost at random, acts and other workers come in between."""
    # laws 3 and 4
    chance = random.Random(seed)
    servers = [broker, *([open_store()] if Feature.PROCESSES in broker.features else [])]
    guests = [Guest(broker) for _ in range(3)]
    local = LiveOwner(broker)
    ran: Counter[str] = Counter()
    held: dict[str, list[Lease]] = {guest.id: [] for guest in guests}
    tokens: set[int] = set()
    for _ in range(120):
        if chance.random() < 0.5:
            jobs = [job(retries=0) for _ in range(chance.randrange(4))]
            nonce = new_id()
            puts = chance.choice(servers).put(jobs, nonce=nonce)
            if chance.random() < 0.5:
                assert chance.choice(servers).put(jobs, nonce=nonce) == puts
        guest = chance.choice(guests)
        guest.broker = chance.choice(servers)
        mine = held[guest.id]
        done = [mine.pop() for _ in range(chance.randrange(len(mine) + 1))]
        step = {
            "verdicts": [Verdict(lease.token, Outcome.SUCCESS) for lease in done],
            "want": guest.want(chance.randrange(4)),
        }
        reply = guest.say(**step)
        while chance.random() < 0.4:  # it never came
            guest.broker = chance.choice(servers)
            if chance.random() < 0.3:
                guest.broker.attach(guest.owner)
            reply = guest.again(**step)
        assert all(reply.settled)
        ran.update(lease.open().id for lease in done)
        assert tokens.isdisjoint(lease.token for lease in reply.leases)
        tokens |= {lease.token for lease in reply.leases}
        mine += reply.leases
        if chance.random() < 0.2:
            for lease in local.take(2):
                assert local.settle(lease)
                ran[lease.open().id] += 1
    # then: nothing is held that its owner does not know of
    for guest in guests:
        for lease in held[guest.id]:
            assert guest.settle(lease)
            ran[lease.open().id] += 1
    for lease in local.take(1000):
        assert local.settle(lease)
        ran[lease.open().id] += 1
    assert set(ran.values()) == {1}
    [row] = broker.stats()
    assert (row.running, row.ready, row.succeeded) == (0, 0, len(ran))


# -- given up ------------------------------------------------------------------------------------


def test_a_silent_remote_owner_is_given_up_with_a_loss(broker: Broker, clock: Clock) -> None:
    # law 6: no witness is left
    given = job()
    broker.put([given])
    guest, other = Guest(broker, lease=4.0), Guest(broker)
    [lease] = guest.take()
    # when
    for _ in range(6):
        assert 0 < broker.count_silence() <= 10
        other.say()
        clock.advance(0.9)
    assert [owner.id for owner in broker.owners()] == [other.id]
    # then
    record = broker.get(given.id)
    assert (record.state, record.attempt, record.losses) == (State.READY, 0, 1)
    reply = guest.say(verdicts=[Verdict(lease.token, Outcome.SUCCESS)], touch=[(lease.token, 0.0)])
    assert (reply.settled, reply.touched) == ([False], [False])
    assert reply.commands == [Command("lost")]
    assert reply.leases == []
    # and begins anew
    broker.attach(guest.owner)
    [again] = guest.take()
    assert (again.losses, again.attempt) == (1, 1)
    assert guest.settle(again)


def test_an_exchanging_owner_is_never_given_up(broker: Broker, clock: Clock) -> None:
    # law 5: slow is not dead; a repetition is a word, and so is to attach
    broker.put([job()])
    guest = Guest(broker, lease=4.0)
    [lease] = guest.take()
    words = [
        lambda: guest.again(want=guest.want(1)),
        lambda: guest.say(),
        lambda: broker.attach(guest.owner),
    ]
    for say in words * 5:
        for _ in range(4):
            clock.advance(0.9)
            broker.count_silence()
        say()
    assert guest.settle(lease)


def test_time_without_a_hearing_process_does_not_count(broker: Broker, clock: Clock) -> None:
    # law 5: the server was down, or stopped, for longer than the lease
    broker.put([job()])
    guest = Guest(broker, lease=4.0)
    [lease] = guest.take()
    for _ in range(4):
        broker.count_silence()
        clock.advance(5.0)
    broker.tick()
    assert guest.settle(lease)


def test_only_the_hearing_process_gives_remote_owners_up(
    broker: Broker, worker: LiveOwner, clock: Clock
) -> None:
    # law 5: workers beside a server that is down
    broker.put([job()])
    guest = Guest(broker, lease=4.0)
    [lease] = guest.take()
    clock.advance(10.0)
    broker.tick()
    assert worker.take() == []
    broker.wait(worker.id, 0.0)
    assert guest.settle(lease)


def test_a_consumer_keeps_a_message_for_its_ttr(broker: Broker, clock: Clock) -> None:
    # law 5
    broker.put([message(ttr=30.0)])
    guest = Guest(broker, lease=4.0, kind="consumer")
    [lease] = guest.take()
    for _ in range(10):
        broker.count_silence()
        clock.advance(0.9)
    assert guest.settle(lease)


def test_a_remote_witness_reports_running_jobs(broker: Broker) -> None:
    # law 6
    jobs = [job(), job()]
    broker.put(jobs)
    guest = Guest(broker)
    first, _ = guest.take(2)
    assert broker.release(guest.id, {first.token: "killed by SIGKILL"}) == 2
    records = [broker.get(one.id) for one in jobs]
    assert [(r.state, r.attempt, r.losses) for r in records if r] == [
        (State.SCHEDULED, 1, 0) if records[0].state is State.SCHEDULED else (State.READY, 1, 0),
        (State.READY, 0, 0),
    ]
    assert broker.release(guest.id, None) == 0
    assert guest.say().commands == [Command("lost")]


def test_steps_from_before_the_attach_are_refused(broker: Broker) -> None:
    # law 4: given up, it attached anew; a request of the time before arrives only now
    guest = Guest(broker)
    for _ in range(5):
        guest.say()
    broker.release(guest.id, None)
    assert guest.say().commands == [Command("lost")]
    broker.put([job(), job()])
    broker.attach(Owner(id=guest.id, name="g1", lease=LONG, serial=guest.serial))
    guest.serial -= 2
    with pytest.raises(TidemillError, match="late"):
        guest.again(want=guest.want(1))
    guest.serial += 2
    assert len(guest.take()) == 1
    assert [row.running for row in broker.stats()] == [1]


# -- a put that comes twice ----------------------------------------------------------------------


def test_a_repeated_put_is_answered_as_the_first_was(broker: Broker, worker: LiveOwner) -> None:
    # law 11: except the very same call retried after a lost reply
    jobs, nonce = [job(), message("m")], new_id()
    puts = broker.put(jobs, nonce=nonce)
    assert [put.placed for put in puts] == [Placed.CREATED] * 2
    assert broker.put(jobs, nonce=nonce) == puts
    # also when they are gone by then
    broker.delete([one.id for one in jobs])
    assert broker.put(jobs, nonce=nonce) == puts
    assert worker.take(9, kinds="both") == []
    with pytest.raises(DuplicateJob):
        broker.put([jobs[0], jobs[0]], nonce=new_id())


def test_a_put_reports_the_effect_for_each_job(broker: Broker) -> None:
    # law 12
    first = job(key="k")
    broker.put([first])
    jobs, nonce = [job(), job(key="k"), job(key="k", on_conflict="replace")], new_id()
    puts = broker.put(jobs, nonce=nonce)
    assert [put.placed for put in puts] == [Placed.CREATED, Placed.KEPT, Placed.REPLACED]
    assert broker.put(jobs, nonce=nonce) == puts


def test_a_refused_schedule_is_tried_again(broker: Broker) -> None:
    given, nonce = job(), new_id()
    broker.put([given])
    with pytest.raises(DuplicateJob):
        broker.put([given], nonce=nonce)
    broker.delete([given.id])
    assert broker.put([given], nonce=nonce)[0].placed is Placed.CREATED


def test_nonces_are_kept_ten_minutes(broker: Broker, clock: Clock) -> None:
    if not clock.fake or clock.of_server:
        pytest.skip("the server counts them by its own clock")
    given, nonce = message(), new_id()
    puts = broker.put([given], nonce=nonce)
    clock.advance(9.9 * 60)
    assert broker.put([given], nonce=nonce) == puts
    clock.advance(20 * 60)
    broker.tick()
    with pytest.raises(DuplicateJob):
        broker.put([given], nonce=nonce)


def test_a_nonce_has_a_length(broker: Broker) -> None:
    with pytest.raises(InvalidOption, match="nonce"):
        broker.put([job()], nonce="x" * 101)
