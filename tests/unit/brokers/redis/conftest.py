"""Fixtures of the tests of Redis: brokers on one store, and replies that are lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import Redis, redis_url

from tidemill.brokers.redis.broker import RedisBroker
from tidemill.brokers.redis.connections import ServerConnection
from tidemill.brokers.registry import open_broker
from tidemill.core.clock import new_id
from tidemill.core.job import Owner


@pytest.fixture
def url() -> str:
    """A new store on the server that all tests share."""
    return f"{redis_url()}?prefix=t{new_id()}"


@pytest.fixture
def open_one(url: str) -> Iterator[Callable[..., RedisBroker]]:
    """Open brokers on the store, or on another if a URL is given, and close them at the end."""
    opened: list[RedisBroker] = []

    def open_one(other: str = "") -> RedisBroker:
        broker = open_broker(other or url)
        opened.append(broker)
        return broker

    yield open_one
    for broker in opened:
        broker.close()


@pytest.fixture
def broker(open_one: Callable[..., RedisBroker]) -> RedisBroker:
    return open_one()


@pytest.fixture
def worker(broker: RedisBroker) -> Owner:
    """An owner "w" of the broker."""
    owner = Owner(id="w", name="w")
    broker.attach(owner)
    return owner


@pytest.fixture
def durable() -> Iterator[Redis]:
    """A server of the test's own, which writes all that it answers to disk."""
    with contextlib.closing(Redis(durable=True)) as server:
        yield server


@pytest.fixture
def lose_replies(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The next answers do not arrive, as many as it is told."""

    def lose(count: int) -> None:
        real, lost = ServerConnection._send, []

        def send(line: ServerConnection, command: tuple[Any, ...]) -> Any:
            answer = real(line, command)
            if len(lost) < count and command[0] == b"FCALL":
                lost.append(command)
                line.close()
                raise ConnectionError("cut")
            return answer

        monkeypatch.setattr(ServerConnection, "_send", send)

    return lose
