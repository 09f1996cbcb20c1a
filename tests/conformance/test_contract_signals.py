"""Signal handlers that raise or enqueue, at every bytecode of a put and of an exchange."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bytecodes import SIGNAL, At
from kinds import Kind

import tidemill
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.postgres.broker import PostgresBroker
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Owner

ROOT = Path(tidemill.__file__).parent
BOUND = 20.0
"""Seconds within which a put must end after a signal: far less is the rule."""

EVERY = 1 if int(os.environ.get("TIDEMILL_ROUNDS", "0")) > 1 else 3
"""A signal comes at each bytecode in ``make long``, else at each third."""


def every_of(broker: Broker) -> int:
    """A call of ``django://`` has ten times as many bytecodes as a call of the others."""
    return 10 * EVERY if broker.url.startswith("django:") else EVERY


pytestmark = [
    pytest.mark.full("postgresql", "rabbitmq", "http"),  # thousands of puts each
    pytest.mark.everyday("lmdb"),
]


class Alarm(TimeoutError):
    """What a timeout by ``signal.alarm`` raises: an OSError, as of a socket."""


@pytest.fixture
def broker(kind: Kind, tmp_path: Path) -> Iterator[Broker]:
    broker = open_broker(kind.store_url(tmp_path, "pool=2" if kind.name == "postgresql" else ""))
    if isinstance(broker, PostgresBroker):
        # another thread uses one of the two, so a handler that enqueues finds none free
        broker._session.connections._count += 1
    yield broker
    broker.close()


@pytest.fixture
def handler() -> Iterator[list[Callable[[], None]]]:
    """The handler of the signal calls the only item, which tests replace."""
    does: list[Callable[[], None]] = [_raise]
    before = signal.signal(SIGNAL, lambda *_: does[0]())
    yield does
    signal.signal(SIGNAL, before)


def _raise() -> None:
    raise Alarm


@functools.cache
def _is_room(path: str) -> bool:
    """Whether signals are sent there: where locks are, and connections."""
    if path == threading.__file__:
        return True
    try:
        parts = Path(path).relative_to(ROOT).parts
    except ValueError:
        return False
    return parts[0] == "brokers" or parts in (("core", "locks.py"), ("core", "signals.py"))


def at_every_step(
    call: Callable[[], object], check: Callable[[At], None], every: int = EVERY
) -> int:
    """Interrupt the call at one bytecode after another; how often it was interrupted."""
    step = 0
    while True:
        step += every
        at = At(step, _is_room)
        try:
            with at:
                call()
        except Alarm:
            pass
        if at.left > 0:
            return step // every - 1
        check(at)


def job() -> Envelope:
    return Envelope(id=new_id(), task="t")


class Other:
    """Another thread that puts when it is told to, so that no thread is made for each put."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._told, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.put: list[str] = []
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while self._told.acquire():
            one = job()
            self._broker.put([one])
            self.put.append(one.id)
            self._done.release()

    def can_put(self) -> bool:
        self._told.release()
        return self._done.acquire(timeout=BOUND)


def can_put(broker: Broker, other: Other, put: list[str]) -> Callable[[At], None]:
    def check(at: At) -> None:
        assert other.can_put(), f"another thread cannot put after {at.where}"
        one = job()
        in_time(lambda: broker.put([one]), f"the thread itself cannot put after {at.where}")
        put.append(one.id)

    return check


def in_time(call: Callable[[], object], trouble: str) -> None:
    """Make a call in the main thread, which a lock that stays taken would block for ever."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident or 0
    alarm = threading.Timer(BOUND, signal.pthread_kill, [main, signal.SIGINT])
    alarm.daemon = True
    alarm.start()
    try:
        call()
    except KeyboardInterrupt:
        pytest.fail(trouble)
    finally:
        alarm.cancel()
        signal.signal(signal.SIGINT, before)


def taken(broker: Broker, most: int) -> list[str]:
    """The ids of all that can be taken, until nothing is left."""
    broker.attach(Owner(id="last", name="w"))
    ids: list[str] = []
    while len(ids) <= most:
        leases = broker.exchange(Step("last", want=Want(100, ("default",), sleep=False))).leases
        if not leases:
            break
        ids += [lease.open().id for lease in leases]
    return ids


def test_a_handler_that_raises_at_any_bytecode_of_a_put_blocks_nobody(
    broker: Broker, handler: list[Callable[[], None]]
) -> None:
    # given
    other, tried, acknowledged = Other(broker), list[str](), list[str]()

    def put() -> None:
        one = job()
        tried.append(one.id)
        broker.put([one])
        acknowledged.append(one.id)

    put()
    # when, then
    every = every_of(broker)
    steps = at_every_step(put, can_put(broker, other, acknowledged), every)
    assert steps > 100 / every
    # and what was acknowledged is there, and nothing twice
    known = acknowledged + other.put
    ids = taken(broker, len(known) + len(tried))
    assert set(known) <= set(ids) <= {*known, *tried}
    assert len(set(ids)) == len(ids)


def test_a_handler_may_enqueue_at_any_bytecode_of_a_put(
    broker: Broker, handler: list[Callable[[], None]]
) -> None:
    # given
    put: list[str] = []

    def enqueue() -> None:
        one = job()
        broker.put([one])
        put.append(one.id)

    enqueue()
    handler[0] = enqueue
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, SIGNAL)}

    def check(at: At) -> None:
        found = {number: signal.getsignal(number) for number in handlers}
        assert found == handlers, f"a handler is not put back after {at.where}"

    # when
    steps = at_every_step(enqueue, check, every_of(broker))
    # then all is stored, that of the handler too
    assert len(put) == 2 * steps + 2
    ids = taken(broker, len(put))
    assert sorted(ids) == sorted(put)


def test_a_handler_that_raises_at_any_bytecode_of_an_exchange_blocks_nobody(
    broker: Broker, handler: list[Callable[[], None]]
) -> None:
    # given
    other, put = Other(broker), list[str]()
    broker.attach(Owner(id="o", name="w"))
    step = Step("o", want=Want(1, ("default",), sleep=False))
    check = can_put(broker, other, put)
    broker.exchange(step)

    def exchanges(at: At) -> None:
        check(at)
        in_time(lambda: broker.exchange(step), f"the owner cannot exchange after {at.where}")

    # when, then
    every = every_of(broker)
    assert at_every_step(lambda: broker.exchange(step), exchanges, 5 * every) > 20 / every
