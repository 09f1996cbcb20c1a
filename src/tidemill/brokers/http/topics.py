"""Topics through the server: bind queues, and publish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.brokers.contract.topics import Bindings
from tidemill.brokers.http.server_calls import ServerCalls
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.errors import FeatureMissing
from tidemill.core.job import Put


class Topics(ServerCalls):
    """The calls of the contract for topics."""

    def bind(self, queue: str, pattern: str) -> bool:
        done: bool = self._call("bind", queue=queue, pattern=pattern)
        return done

    def unbind(self, queue: str, pattern: str) -> bool:
        done: bool = self._call("unbind", queue=queue, pattern=pattern)
        return done

    def bindings(self, *, txn: Any = None) -> Bindings:
        _refuse(txn)
        found: Bindings = self._call("bindings")
        return found

    def publish(
        self, jobs: Sequence[Envelope], version: str, *, txn: Any = None, nonce: str = ""
    ) -> list[Put] | None:
        _refuse(txn)
        puts: list[Put] | None = self._call(
            "publish", jobs=jobs, version=version, nonce=nonce or new_id()
        )
        return puts


def _refuse(txn: Any) -> None:
    if txn is not None:
        raise FeatureMissing("txn= needs the feature transactions, which http:// does not have")
