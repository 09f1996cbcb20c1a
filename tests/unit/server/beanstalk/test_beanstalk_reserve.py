"""The ends of a wait for a job at the beanstalk port, and which of them may be a little late."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from in_loop import in_loop

from tidemill.server.beanstalk import commands as taking
from tidemill.server.beanstalk.parser import TIMED_OUT
from tidemill.server.beanstalk.shared_state import Client, Tubes


class SharedOwner:
    """Has nothing; remembers how long it was waited for, and how long at most it may be."""

    def __init__(self, *, closing: bool = False) -> None:
        self.closing = closing
        self.given: list[tuple[float, float]] = []

    async def reserve(self, *given: Any) -> list[Any]:
        assert len(self.given) < 10, "a wait that is over goes on"
        self.given.append((round(given[2], 1), round(given[4], 1)))
        return []


@pytest.mark.parametrize(
    ("until", "warn", "pause", "given"),
    [
        (100, float("inf"), 0, (100, float("inf"))),
        (100, 100.1, 0, (100, 100.1)),
        (100, 50, 0, (50, 50)),
        (100, 50, 20, (20, 20)),
        (100, -1, 0, (0, 0)),
    ],
)
@in_loop
async def test_a_warning_and_the_end_of_a_pause_are_on_time(
    until: float, warn: float, pause: float, given: tuple[float, float]
) -> None:
    tubes, shared_owner = Tubes(), SharedOwner()
    client = Client(tubes, lambda reservation: None, lambda: None)
    client.watch["paused"] = tube = tubes["paused"]
    now = time.monotonic()
    if pause:
        tube.paused_for, tube.paused_until = 1, now + pause
    look: Any = taking._look
    assert (
        await look(SimpleNamespace(shared_owner=shared_owner), client, now + until, now + warn)
        is None
    )
    assert shared_owner.given == [given]


@pytest.mark.parametrize("what", ["the port closes", "the client has left"])
@in_loop
async def test_a_wait_ends_with_the_port_and_with_its_client(what: str) -> None:
    shared_owner = SharedOwner(closing=what == "the port closes")
    client = Client(Tubes(), lambda reservation: None, lambda: None)
    client.has_left = what == "the client has left"
    backing: Any = SimpleNamespace(shared_owner=shared_owner)
    assert await taking.reserve(backing, client) == TIMED_OUT
    assert len(shared_owner.given) == 1
