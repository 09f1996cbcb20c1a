"""Calls to a silent server while signals keep coming."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from servers import Redis

from tidemill.brokers.redis.broker import RedisBroker
from tidemill.core.envelope import Envelope
from tidemill.core.signals import SignalsDeferred
from tidemill.errors import BrokerUnavailable

pytestmark = pytest.mark.everyday


@pytest.fixture
def ticks() -> Iterator[None]:
    """A signal comes four times a second. Its handler ends a test that takes far too long."""
    give_up = time.monotonic() + 20

    def handle(*_: object) -> None:
        assert time.monotonic() < give_up, "signals make the wait longer"

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.25, 0.25)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("ticks")
def test_a_call_to_a_silent_server_ends_in_time_although_signals_come(
    durable: Redis, open_one: Callable[..., RedisBroker]
) -> None:
    broker = open_one(f"{durable.url}?patience=1")
    broker.put([Envelope(id="a", task="t")])
    for section in (contextlib.nullcontext(), SignalsDeferred()):
        with durable.stalled(), section, pytest.raises(BrokerUnavailable):
            broker.put([Envelope(id="b", task="t")])
