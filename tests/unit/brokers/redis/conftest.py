"""Fixtures of the tests of Redis: replies of the server that are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidemill.brokers.redis.connections import ServerConnection


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
