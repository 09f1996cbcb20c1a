"""``http://`` and ``https://``: the broker of a store behind a job server.

Each call of the contract is one call of the server (:mod:`tidemill.brokers.contract.rpc`). The
connections to the server are in :mod:`.connections`, the owners of this process in :mod:`.owners`.
The calls that only forward their arguments have files of their own: :mod:`.inspect`,
:mod:`.admin`, :mod:`.limits`, :mod:`.schedules`, :mod:`.history`,
:mod:`.transfer` and :mod:`.waits`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.rpc import MOST, Hello
from tidemill.brokers.http.address import Address, check_url
from tidemill.brokers.http.admin import Admin
from tidemill.brokers.http.connections import Server, ServerConnections
from tidemill.brokers.http.history import History
from tidemill.brokers.http.inspect import Inspection
from tidemill.brokers.http.limits import Limits
from tidemill.brokers.http.owners import Owners
from tidemill.brokers.http.schedules import Schedules
from tidemill.brokers.http.transfer import Transfer
from tidemill.brokers.http.waits import Waits
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.core.clock import new_id
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope
from tidemill.core.errors import BrokerUnavailable, FeatureMissing
from tidemill.core.job import Put
from tidemill.core.owner import Owner

_NOT_HERE = {Feature.TRANSACTIONS, Feature.REMOTE_OWNERS, Feature.NAMED}


def open_url(url: Url) -> HttpBroker:
    """The broker of a URL."""
    return HttpBroker(check_url(url))


class HttpBroker(Inspection, Admin, Limits, Schedules, History, Transfer, Waits):
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

    # -- producing ------------------------------------------------------------------------------

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
            raise FeatureMissing("txn= needs the feature transactions, which http:// does not have")
        if not jobs and not let_go:
            return []
        more = {"hold": list(hold), "let_go": list(let_go)} if hold or let_go else {}
        puts: list[Put] = self._call("put", jobs=jobs, nonce=nonce or new_id(), **more)
        return puts

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self._check_open()
        self._owners.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._owners.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        return self._owners[step.owner].exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        self._check_open()
        return self._owners[owner_id].sleep(timeout, fds)

    def wake(self, owner_id: str) -> None:
        self._owners.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        given: int = self._call("release", owner_id=owner_id, causes=causes)
        return given

    def tick(self) -> float:
        seconds: float = self._call("tick")
        return seconds

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
