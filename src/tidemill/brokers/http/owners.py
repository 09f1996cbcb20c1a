"""The owners of this process: attaching, exchanging, sleeping, detaching.

A sleeping owner keeps a request open (a long poll): the server answers when there may be a job or
command for the owner. The request has a separate connection, which is polled with the other
descriptors of the sleep. The request stays open while the owner works, so no hint is lost between
two sleeps. A broken connection counts as a hint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step, left
from tidemill.brokers.contract.rpc import CALLS, LONGEST
from tidemill.brokers.http.connections import (
    STEP_TIMEOUT,
    Server,
    ServerConnection,
    ServerConnections,
)
from tidemill.brokers.http.errors import OtherVersion, ServerAway
from tidemill.brokers.http.presence import Presence
from tidemill.brokers.http.response import Response
from tidemill.brokers.network.repeated_calls import RepeatedCalls
from tidemill.brokers.shared.wake_pipe import WakePipe, readable
from tidemill.core.job import Owner
from tidemill.errors import BrokerUnavailable, TidemillError

_GRACE = 5.0  # seconds that the answer to a wait may be late before its connection counts as broken


class WakeUpPoll:
    """The open request of one owner for a hint, on a connection of its own."""

    def __init__(self, server: Server, owner_id: str) -> None:
        self._owner_id = owner_id
        self._connection = ServerConnection(server, STEP_TIMEOUT)
        self._response: Response | None = None  # the received part of the answer
        self.late_at = 0.0  # monotonic time after which the request counts as lost

    def request(self, server_name: str) -> int:
        """Send the request, unless it is open; return the descriptor. Raises BrokerUnavailable."""
        if self._response is None:
            arguments = {"owner_id": self._owner_id, "timeout": LONGEST, "server": server_name}
            self._connection.send("wait", CALLS["wait"].write(arguments))
            self._response = Response()
            self.late_at = time.monotonic() + LONGEST + _GRACE
        return self._connection.fileno()

    def read(self) -> bool | None:
        """Read the answer: True for a hint, False when the time is over, None if incomplete."""
        assert self._response is not None
        try:
            if time.monotonic() >= self.late_at:
                self.close()
                return True
            if not self._connection.read_some(self._response):
                return None
            response, self._response = self._response, None
            return bool(self._connection.take("wait", response))
        except BrokerUnavailable:
            self.close()
            raise

    def close(self) -> None:
        self._response = None
        self._connection.close()

    def end(self) -> None:
        self._response = None
        self._connection.end()


class LocalOwner:
    """An owner of this process: its exchanges and its sleep."""

    def __init__(self, server: Server, owner: Owner) -> None:
        self.owner = owner
        self._lease = server.address.owner_lease
        self._connection = ServerConnection(server, STEP_TIMEOUT)
        self._wakeup = WakeUpPoll(server, owner.id)
        self._calls = RepeatedCalls(self._send, owner.serial)
        self._renew_at = time.monotonic() + self._lease / 3
        self._pipe = WakePipe()
        self._left = False  # at the last step the server spoke another version: no hint will come

    @property
    def serial(self) -> int:
        return self._calls.serial

    def exchange(self, step: Step) -> Reply:
        """Exchange one step. After a lost reply the next exchange repeats the step."""
        try:
            reply = self._calls.exchange(step)
        except OtherVersion as error:
            self._wakeup.close()
            if self.owner.kind == "consumer":
                raise
            self._left = True
            return left(step, error)
        except BrokerUnavailable:
            self._wakeup.close()  # its connection leads to the same server
            raise
        self._left = False
        return reply

    def _send(self, step: Step, serial: int) -> Reply:
        numbered = msgspec.structs.replace(step, serial=serial)
        sent = time.monotonic()
        body = CALLS["exchange"].write({"step": numbered})
        reply: Reply = self._connection.call("exchange", body)
        self._renew_at = sent + self._lease / 3
        return reply

    def sleep(self, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep until a hint, a wake-up, a descriptor, lease renewal or the timeout."""
        until = min(time.monotonic() + max(0.0, timeout), self._renew_at)
        if self._left:
            ready = readable([self._pipe.fd, *fds], max(0.0, min(timeout, LONGEST)))
            if self._pipe.fd in ready:
                self._pipe.drain()
            return [fd for fd in ready if fd in fds]
        while True:
            wakeup_fd = self._wakeup.request(self._connection.server_name)
            seconds = min(until, self._wakeup.late_at) - time.monotonic()
            ready = readable([wakeup_fd, self._pipe.fd, *fds], max(0.0, seconds))
            hint = None
            if wakeup_fd in ready or time.monotonic() >= self._wakeup.late_at:
                try:
                    hint = self._wakeup.read()
                except (OtherVersion, ServerAway):  # the next step tells the owner
                    hint = True
            if self._pipe.fd in ready:
                hint = True
                self._pipe.drain()
            ready = [fd for fd in ready if fd in fds]
            if ready or hint or time.monotonic() >= until:
                return ready

    def wake(self) -> None:
        self._pipe.wake()

    def close(self) -> None:
        self._connection.end()
        self._wakeup.end()
        self._pipe.close()


class Owners:
    """The owners of this process in one store."""

    def __init__(self, connections: ServerConnections, impatient: ServerConnections) -> None:
        """``impatient`` connections do not wait for a server that is away."""
        self._connections = connections
        self._impatient = impatient
        self._presence = Presence(connections.server)
        self._owners: dict[str, LocalOwner] = {}

    def __getitem__(self, owner_id: str) -> LocalOwner:
        """An attached owner of this process. Raises TidemillError for another one."""
        local = self._owners.get(owner_id)
        if local is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return local

    def ids(self) -> list[str]:
        return list(self._owners)

    def attach(self, owner: Owner) -> None:
        before = self._owners.get(owner.id)
        # Begin a new session: without this, the server would continue the old session.
        if before is not None:
            self.detach(owner.id)
        server = self._connections.server
        remote = msgspec.structs.replace(
            owner,
            lease=server.address.owner_lease,
            serial=before.serial if before is not None else 0,
            board="",  # the scoreboard is a file of this machine, which the server cannot read
        )
        local = LocalOwner(server, remote)
        try:
            self._connections.call("attach", owner=remote)
        except BaseException:
            local.close()
            raise
        self._owners[owner.id] = local
        if owner.kind == "consumer":
            self._presence.add(owner.id)

    def detach(self, owner_id: str, *, impatient: bool = False) -> None:
        if self._drop(owner_id) is not None:
            connections = self._impatient if impatient else self._connections
            connections.call("detach", owner_id=owner_id)

    def _drop(self, owner_id: str) -> LocalOwner | None:
        local = self._owners.pop(owner_id, None)
        if local is not None:
            local.close()
            if local.owner.kind == "consumer":
                self._presence.remove(owner_id)
        return local

    def wake(self, owner_id: str) -> None:
        local = self._owners.get(owner_id)
        if local:
            local.wake()

    def close(self) -> None:
        self._presence.close()
        for local in list(self._owners.values()):
            local.close()
        self._owners.clear()
