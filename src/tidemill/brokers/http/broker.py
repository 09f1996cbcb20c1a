"""``http://`` and ``https://``: the broker of a store that a job server keeps.

This file turns each call of the seam into one call of the server's (:mod:`tidemill.brokers.calls`).
The way to the server is in :mod:`.lines`, the owners of this process in :mod:`.members`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tidemill.brokers.base import Departure, Feature, Filter, Page, QueueStats, Reply, Step
from tidemill.brokers.calls import LONGEST, MOST, Hello
from tidemill.brokers.forks import tell_of_forks
from tidemill.brokers.http.address import Address, check_url
from tidemill.brokers.http.lines import Lines, Server
from tidemill.brokers.http.members import Members
from tidemill.brokers.schedules import Change, Changed, Schedule
from tidemill.brokers.unknown import UnknownTask
from tidemill.clock import new_id
from tidemill.config import Url
from tidemill.errors import BrokerUnavailable, FeatureMissing, TidemillError
from tidemill.gate import Held, LimitStats, Terms
from tidemill.job import Command, Envelope, Owner, Put, Record

__all__ = ["HttpBroker", "open_url"]

_NOT_HERE = {Feature.TRANSACTIONS, Feature.ELSEWHERE, Feature.NAMED}


def open_url(url: Url) -> HttpBroker:
    """The broker of a URL."""
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
            hello: Hello = self._lines.call("hello")
        except BaseException:
            self._hang_up()
            raise
        self._most = self._lines.most = hello.most
        self.identity = hello.identity
        known = {str(feature): feature for feature in Feature}
        kept = {known[name] for name in hello.features if name in known}
        self.features = frozenset((kept | {Feature.PROCESSES}) - _NOT_HERE)
        tell_of_forks(self)

    def _begin(self) -> None:
        """Begin in this process, which may be a fork of the one that opened the broker."""
        server = Server(self._address)
        self._lines = Lines(server, self._address.patience)
        self._lines.most = self._most
        self._brisk = Lines(server, 0.0)
        self._members = Members(self._lines, self._brisk)

    def after_fork_child(self) -> None:
        """In a forked child: lines and owners are the parent's; close our copies."""
        if not self._closed:
            self._hang_up()
            self._begin()

    def _hang_up(self) -> None:
        self._members.close()
        self._lines.close()
        self._brisk.close()

    def _call(self, call: str, /, **arguments: Any) -> Any:
        self._check_open()
        return self._lines.call(call, **arguments)

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")

    @property
    def boards(self) -> str:
        """None: whoever could read a board after a death has no witness's standing elsewhere."""
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
        self._members.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._members.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        return self._members[step.owner].exchange(step)

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        self._check_open()
        return self._members[owner_id].sleep(timeout, fds)

    def wake(self, owner_id: str) -> None:
        self._members.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        given: int = self._call("release", owner_id=owner_id, causes=causes)
        return given

    def recall(self) -> int:
        given: int = self._call("recall")
        return given

    def tick(self) -> float:
        seconds: float = self._call("tick")
        return seconds

    def count_silence(self) -> float:
        self._check_open()
        return float("inf")  # the server counts, which hears them

    # -- waiting for jobs -----------------------------------------------------------------------

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        until = time.monotonic() + timeout
        enough = any if first else all
        while True:
            records: list[Record | None] = self._wait("wait_for", until, ids=list(ids), first=first)
            while len(records) < len(ids):  # they did not fit into one answer
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

    def _wait(self, call: str, until: float, **arguments: Any) -> Any:
        """One of the calls that wait: the server lets each go on for a while."""
        self._check_open()
        seconds = max(0.0, min(until - time.monotonic(), LONGEST))
        return self._lines.call(call, extra=seconds, timeout=seconds, **arguments)

    # -- inspecting -----------------------------------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        record: Record | None = self._call("get", job_id=job_id)
        return record

    def was_here(self, job_id: str) -> bool:
        was: bool = self._call("was_here", job_id=job_id)
        return was

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        page: Page = self._call("find", what=what, limit=limit, cursor=cursor)
        return page

    def stats(self) -> list[QueueStats]:
        rows: list[QueueStats] = self._call("stats")
        return rows

    def owners(self) -> list[Owner]:
        owners: list[Owner] = self._call("owners")
        return owners

    def info(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._call("info")
        kept = {"store": facts.get("broker", ""), "kept_at": facts.get("url", "")}
        return {**facts, "broker": "http", "url": self.url, **kept}

    # -- acting ---------------------------------------------------------------------------------

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        done: list[bool] = self._call("cancel", job_ids=list(job_ids), terminate=terminate)
        return done

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        done: list[bool] = self._call("kick", job_ids=list(job_ids), force=force)
        return done

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        done: list[bool] = self._call("delete", job_ids=list(job_ids))
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self._call("set_queue", queue=queue, paused=paused, max_size=max_size)

    def purge(self, queue: str) -> int:
        removed: int = self._call("purge", queue=queue)
        return removed

    def forget_queue(self, queue: str) -> bool:
        forgotten: bool = self._call("forget_queue", queue=queue)
        return forgotten

    def command(self, owner_id: str, command: Command) -> bool:
        told: bool = self._call("command", owner_id=owner_id, command=command)
        return told

    def backup(self, target: str) -> None:
        self._call("backup", target=target)

    # -- limits ---------------------------------------------------------------------------------

    def set_limit(
        self, name: str, terms: Terms | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        self._call("set_limit", name=name, terms=terms, queue=queue, declared=declared)

    def limits(self) -> list[LimitStats]:
        found: list[LimitStats] = self._call("limits")
        return found

    def held(self, job_id: str) -> Held | None:
        found: Held | None = self._call("held", job_id=job_id)
        return found

    def unknown_tasks(self) -> list[UnknownTask]:
        found: list[UnknownTask] = self._call("unknown_tasks")
        return found

    # -- schedules ------------------------------------------------------------------------------

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        found: list[Schedule | None] = self._call("schedules", names=list(names))
        return found

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        found: list[Schedule] = self._call("list_schedules", after=after, limit=limit)
        return found

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        done: list[Changed] = self._call("change_schedules", changes=changes)
        return done

    # -- moving to another store ----------------------------------------------------------------

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        departure: Departure = self._call("depart", where=where, seal=seal)
        return departure

    def stay(self) -> None:
        self._call("stay")

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        taken: list[bool] = self._call(
            "adopt", departure=departure, records=records, cursor=cursor, schedules=schedules
        )
        return taken

    def adopted(self, mark: str) -> str:
        cursor: str = self._call("adopted", mark=mark)
        return cursor

    def close(self) -> None:
        if not self._closed:
            for owner_id in self._members.ids():
                with contextlib.suppress(BrokerUnavailable):  # it will be given up in time
                    self._members.detach(owner_id, brisk=True)
            self._hang_up()
        self._closed = True
