"""The owners of this process: coming, going, exchanging, sleeping.

An owner that sleeps has asked the server to answer once something may have happened (a long poll),
on a connection of its own that is polled beside whatever else it sleeps on. The question stays
asked while the owner is up: what happens meanwhile answers it, so no hint falls between two sleeps.
One whose answer was lost with its line counts as a hint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tidemill.brokers.base import Reply, Step
from tidemill.brokers.calls import CALLS, LONGEST
from tidemill.brokers.conversation import Conversation
from tidemill.brokers.http.lines import STEP_TIMEOUT, Line, Lines, Server
from tidemill.brokers.http.response import Response
from tidemill.brokers.http.trouble import Away
from tidemill.brokers.wakepipe import WakePipe, readable
from tidemill.errors import BrokerUnavailable, TidemillError
from tidemill.job import Owner

__all__ = ["Members"]

_GRACE = 5.0
"""Seconds that an answer to a wait may be late before its line counts as broken."""


class Bell:
    """What one owner has asked to be told, on a line of its own."""

    def __init__(self, server: Server, owner_id: str) -> None:
        self._owner_id = owner_id
        self._line = Line(server, STEP_TIMEOUT)
        self._response: Response | None = None  # to what is asked, as far as it has come
        self._late_at = 0.0

    def ask(self, told_by: str) -> int:
        """Ask, if it is not asked already; the descriptor to poll.

        Raises:
            BrokerUnavailable: the server is away.
        """
        if self._response is None:
            arguments = {"owner_id": self._owner_id, "timeout": LONGEST, "server": told_by}
            self._line.send("wait", CALLS["wait"].write(arguments))
            self._response = Response()
            self._late_at = time.monotonic() + LONGEST + _GRACE
        return self._line.fileno()

    @property
    def late_at(self) -> float:
        """When it is no use to wait on."""
        return self._late_at

    def hear(self) -> bool | None:
        """What has come: True for a hint, False when the time is over, None for nothing whole."""
        assert self._response is not None
        try:
            if time.monotonic() >= self._late_at:
                self.close()
                return True
            if not self._line.read_some(self._response):
                return None
            response, self._response = self._response, None
            return bool(self._line.take("wait", response))
        except BrokerUnavailable:
            self.close()
            raise

    def close(self) -> None:
        """Hang up; the next question is asked anew."""
        self._response = None
        self._line.close()

    def end(self) -> None:
        """Hang up for good."""
        self._response = None
        self._line.end()


class Member:
    """An owner of this process: its conversation, and what it sleeps on."""

    def __init__(self, server: Server, owner: Owner) -> None:
        self.owner = owner
        self._lease = server.address.owner_lease
        self._line = Line(server, STEP_TIMEOUT)
        self._bell = Bell(server, owner.id)
        self._talk = Conversation(self._send, owner.serial)
        self._renew_at = time.monotonic() + self._lease / 3
        self._pipe = WakePipe()

    @property
    def serial(self) -> int:
        """The last one it gave a step."""
        return self._talk.serial

    def exchange(self, step: Step) -> Reply:
        """One step; whatever became of it, the next one makes good for it."""
        try:
            return self._talk.exchange(step)
        except BrokerUnavailable:
            self._bell.close()  # its line leads to the same server
            raise

    def _send(self, step: Step, serial: int) -> Reply:
        numbered = msgspec.structs.replace(step, serial=serial)
        asked = time.monotonic()
        reply: Reply = self._line.ask("exchange", CALLS["exchange"].write({"step": numbered}))
        self._renew_at = asked + self._lease / 3
        return reply

    def sleep(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Until a hint, a wake, a readable descriptor, the time to renew, or the timeout.

        Raises:
            BrokerUnavailable: the line is broken; the next call makes it anew.
        """
        until = min(time.monotonic() + max(0.0, timeout), self._renew_at)
        while True:
            bell = self._bell.ask(self._line.told_by)
            now = time.monotonic()
            left = min(until, self._bell.late_at) - now
            ready = readable([bell, self._pipe.fd, *fds], max(0.0, left))
            hint = None
            if bell in ready or time.monotonic() >= self._bell.late_at:
                try:
                    hint = self._bell.hear()
                except Away:
                    hint = True
            if self._pipe.fd in ready:
                hint = True
                self._pipe.drain()
            ready = [fd for fd in ready if fd in fds]
            if ready or hint or time.monotonic() >= until:
                return ready

    def wake(self) -> None:
        """End its sleep, from any thread."""
        self._pipe.wake()

    def close(self) -> None:
        """Hang up for good."""
        self._line.end()
        self._bell.end()
        self._pipe.close()


class Members:
    """The members this process has in one store."""

    def __init__(self, lines: Lines, brisk: Lines) -> None:
        """``brisk`` lines have no patience."""
        self._lines = lines
        self._brisk = brisk
        self._members: dict[str, Member] = {}

    def __getitem__(self, owner_id: str) -> Member:
        """A member that is attached.

        Raises:
            TidemillError: it is not, or not here.
        """
        member = self._members.get(owner_id)
        if member is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return member

    def ids(self) -> list[str]:
        """The ids of all that are attached here."""
        return list(self._members)

    def attach(self, owner: Owner) -> None:
        """Make an owner known, and alive as long as it is heard of."""
        before = self._members.get(owner.id)
        if before is not None:  # it begins afresh; else the server would go on with it
            self.detach(owner.id)
        server = self._lines.server
        mine = msgspec.structs.replace(
            owner,
            lease=server.address.owner_lease,
            serial=before.serial if before is not None else 0,
            board="",  # it lies on this machine, where the server cannot read it
        )
        member = Member(server, mine)
        try:
            self._lines.call("attach", owner=mine)
        except BaseException:
            member.close()
            raise
        self._members[owner.id] = member

    def detach(self, owner_id: str, *, brisk: bool = False) -> None:
        """Take an owner off the list; what it held goes back uncounted."""
        if self._drop(owner_id) is not None:
            lines = self._brisk if brisk else self._lines
            lines.call("detach", owner_id=owner_id)

    def _drop(self, owner_id: str) -> Member | None:
        member = self._members.pop(owner_id, None)
        if member is not None:
            member.close()
        return member

    def wake(self, owner_id: str) -> None:
        """End an owner's sleep, from any thread."""
        member = self._members.get(owner_id)
        if member:
            member.wake()

    def close(self) -> None:
        """Hang up all lines."""
        for member in list(self._members.values()):
            member.close()
        self._members.clear()
