"""``http://`` and ``https://``: the broker of a store behind a job server.

Each call of the contract is one call of the server (:mod:`tidemill.brokers.contract.rpc`). The
connections to the server are in :mod:`.connections`, the owners of this process in :mod:`.owners`.
A call that only passes its arguments on is one line here (:func:`forwarded`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from tidemill.brokers.contract.admin import Admin
from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.history import History
from tidemill.brokers.contract.inspection import Inspection
from tidemill.brokers.contract.limits import LimitCalls
from tidemill.brokers.contract.rpc import LONGEST, MOST, Hello
from tidemill.brokers.contract.schedules import Schedules
from tidemill.brokers.contract.transfer import Transfer
from tidemill.brokers.http.address import Address, check_url
from tidemill.brokers.http.connections import Server, ServerConnections
from tidemill.brokers.http.owners import Owners
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.brokers.shared.forwarded import by, forwarded_to
from tidemill.core.clock import new_id
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope
from tidemill.core.job import Put, Record
from tidemill.errors import BrokerUnavailable, TidemillError

_NOT_HERE = {Feature.TRANSACTIONS, Feature.REMOTE_OWNERS, Feature.NAMED}


P = ParamSpec("P")
R = TypeVar("R")


def forwarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A call of the contract as a call of the server with the same arguments."""
    name = method.__name__
    return forwarded_to(method, lambda broker, **given: broker._call(name, **given))


def open_url(url: Url) -> HttpBroker:
    return HttpBroker(check_url(url))


class HttpBroker:
    """A broker behind a job server."""

    def __init__(self, address: Address) -> None:
        self.url = address.shown
        self._address = address
        self._closed = False
        self._most = MOST
        self._begin()
        try:
            hello: Hello = self._connections.call("hello")
        except BaseException:
            self._hang_up()
            raise
        self._most = self._connections.most = hello.most
        self.identity = hello.identity
        known = {str(feature): feature for feature in Feature}
        served = {known[name] for name in hello.features if name in known}
        self.features = frozenset((served | {Feature.PROCESSES}) - _NOT_HERE)
        tell_of_forks(self)

    def _begin(self) -> None:
        """Connect from this process, which may be a fork of the process that opened the broker."""
        server = Server(self._address)
        self._connections = ServerConnections(server, self._address.patience)
        self._connections.most = self._most
        self._impatient = ServerConnections(server, 0.0)
        self._owners = Owners(self._connections, self._impatient)

    def after_fork_child(self) -> None:
        """Close the copies of the parent's connections in a forked child, and connect again."""
        if not self._closed:
            self._hang_up()
            self._begin()

    def _hang_up(self) -> None:
        self._owners.close()
        self._connections.close()
        self._impatient.close()

    @property
    def boards(self) -> str:
        """Always empty: the server, which would read scoreboards, runs on another machine."""
        return ""

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        if txn is not None:
            raise lacks(self.url, Feature.TRANSACTIONS, "txn=")
        if not jobs and not let_go:
            return []
        more = {"hold": list(hold), "let_go": list(let_go)} if hold or let_go else {}
        puts: list[Put] = self._call("put", jobs=jobs, nonce=nonce or new_id(), **more)
        return puts

    attach = by("_owners", Broker.attach)
    detach = by("_owners", Broker.detach)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        return self._owners[step.owner].exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        self._check_open()
        return self._owners[owner_id].sleep(timeout, fds)

    def wake(self, owner_id: str) -> None:
        self._owners.wake(owner_id)

    release = forwarded(Broker.release)
    tick = forwarded(Broker.tick)

    def count_silence(self) -> float:
        self._check_open()
        return float("inf")  # the server counts the silence, since only the server hears the owners

    def close(self) -> None:
        if not self._closed:
            for owner_id in self._owners.ids():
                # If this fails, the owner's lease ends later.
                with contextlib.suppress(BrokerUnavailable):
                    self._owners.detach(owner_id, impatient=True)
            self._hang_up()
        self._closed = True

    get = forwarded(Inspection.get)
    was_here = forwarded(Inspection.was_here)
    find = forwarded(Inspection.find)
    ahead = forwarded(Inspection.ahead)
    stats = forwarded(Inspection.stats)
    owners = forwarded(Inspection.owners)

    def info(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._call("info")
        kept = {"store": facts.get("broker", ""), "kept_at": facts.get("url", "")}
        return {**facts, "broker": "http", "url": self.url, **kept}

    limits = forwarded(LimitCalls.limits)
    held = forwarded(LimitCalls.held)
    history = forwarded(History.history)
    history_kinds = forwarded(History.history_kinds)

    cancel = forwarded(Admin.cancel)
    retry = forwarded(Admin.retry)
    delete = forwarded(Admin.delete)
    alter = forwarded(Admin.alter)
    set_queue = forwarded(Admin.set_queue)
    forget_queue = forwarded(Admin.forget_queue)
    command = forwarded(Admin.command)
    backup = forwarded(Admin.backup)
    set_limit = forwarded(LimitCalls.set_limit)
    keep_history = forwarded(History.keep_history)

    wall = forwarded(Schedules.wall)
    schedules = forwarded(Schedules.schedules)
    list_schedules = forwarded(Schedules.list_schedules)
    change_schedules = forwarded(Schedules.change_schedules)
    depart = forwarded(Transfer.depart)
    stay = forwarded(Transfer.stay)
    adopt = forwarded(Transfer.adopt)
    adopted = forwarded(Transfer.adopted)

    # A wait is made in calls of a while each, which the broker repeats.

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        until = time.monotonic() + timeout
        enough = any if first else all
        while True:
            records: list[Record | None] = self._wait("wait_for", until, ids=list(ids), first=first)
            while len(records) < len(ids):  # call again when not all records fit into one answer
                rest = list(ids[len(records) :])
                records += self._wait("wait_for", 0.0, ids=rest, first=False)
            over = enough(record is None or record.state.finished for record in records)
            if not ids or over or time.monotonic() >= until:
                return records

    def wait_space(self, queue: str, timeout: float) -> bool:
        until = time.monotonic() + timeout
        while True:
            if self._wait("wait_space", until, queue=queue):
                return True
            if time.monotonic() >= until:
                return False

    def _wait(self, name: str, until: float, **arguments: Any) -> Any:
        self._check_open()
        seconds = max(0.0, min(until - time.monotonic(), LONGEST))
        return self._connections.call(name, extra=seconds, timeout=seconds, **arguments)

    def _call(self, name: str, /, **arguments: Any) -> Any:
        self._check_open()
        return self._connections.call(name, **arguments)

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
