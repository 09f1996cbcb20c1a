"""``postgresql://``: the broker in a PostgreSQL database.

This file is the conversation: it turns each call of the seam into a call of the server's. What the
server does is in ``sql/``; the owners of this process are in :mod:`.members`, those who wait in
:mod:`.waits`, what is shown in :mod:`.inspect`.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tidemill.brokers.base import (
    Departure,
    Feature,
    Filter,
    Page,
    QueueStats,
    Reply,
    Step,
)
from tidemill.brokers.forks import tell_of_forks
from tidemill.brokers.parking import Parked, sleep
from tidemill.brokers.postgres import inspect, limits, moving
from tidemill.brokers.postgres import schedules as stored
from tidemill.brokers.postgres.address import Address, check_url
from tidemill.brokers.postgres.grants import statements
from tidemill.brokers.postgres.members import Members
from tidemill.brokers.postgres.migrating import bring_up
from tidemill.brokers.postgres.puts import put, put_inside
from tidemill.brokers.postgres.session import Session
from tidemill.brokers.postgres.waits import Waits
from tidemill.brokers.postgres.wire import json, leases_of, texts
from tidemill.brokers.schedules import Change, Changed, Schedule
from tidemill.brokers.steps import is_lost, lost
from tidemill.brokers.unknown import UnknownTask
from tidemill.clock import id_time, wall_time
from tidemill.config import Url
from tidemill.errors import FeatureMissing, TidemillError
from tidemill.gate import Held, LimitStats, Terms
from tidemill.job import Command, Envelope, Lease, Owner, Put, Record, State

__all__ = ["PostgresBroker", "grants_url", "migrate_url", "open_url"]

_PRUNE_MOST = 2000
_PURGE_MOST = 5000
_TICK = 30.0


def open_url(url: Url) -> PostgresBroker:
    """The broker of a ``postgresql://`` URL."""
    return PostgresBroker(check_url(url))


def migrate_url(url: Url) -> tuple[int, int]:
    """Make the tables of a ``postgresql://`` URL, or change them; the versions before and after."""
    return bring_up(check_url(url))


def grants_url(url: Url, role: str) -> list[str]:
    """The SQL that lets a role use the store of a ``postgresql://`` URL."""
    return statements(check_url(url).schema, role)


class PostgresBroker:
    """A broker in a PostgreSQL database."""

    features = frozenset(Feature) - {Feature.BACKUP, Feature.DRAIN}

    def __init__(self, address: Address) -> None:
        self.url = address.shown
        self._address = address
        self._closed = False
        self._enter()
        tell_of_forks(self)

    def _enter(self) -> None:
        """Begin in this process, which may be a fork of the one that opened the broker."""
        self._pid = os.getpid()
        self._next_tick = 0.0
        self._session = Session(self._address, self._heard, self._back)
        self._members = Members(self._session)
        self.waits = Waits(self._session)

    def _heard(self, word: str) -> None:
        if not word[0].isdecimal():
            self.waits.heard()
        self._members.heard(word)

    def _back(self) -> None:
        """What was said while the connection was broken was not heard."""
        self._members.wake_all()
        self.waits.heard()

    def after_fork_child(self) -> None:
        """In a forked child: connections, owners and sleepers are the parent's."""
        if not self._closed:
            self._session.after_fork_child()
            self._members.after_fork_child()
            self.waits.after_fork_child()

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        if self._pid != os.getpid():
            self._enter()

    @property
    def identity(self) -> str:
        """What tells this store from every other."""
        return f"postgresql {self._session.installed.store}"

    @property
    def boards(self) -> str:
        """Where boards may lie."""
        return self._members.boards

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
        self._check_open()
        if txn is not None:
            return put_inside(self._session, jobs, txn, hold, let_go)
        return put(self._session, jobs, hold, let_go, nonce)

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self._check_open()
        self._members.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._members.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.serial or step.behalf:
            member = self._members.find(step.owner)
        else:
            member = self._members[step.owner]
        if member is None:
            return lost(step)
        reply = member.exchange(step)
        if step.serial and is_lost(reply) and (anew := self._members.anew(member)):
            member, reply = anew, anew.exchange(step)
        if not step.behalf:
            self._members.renewed(member, step)
        return reply

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        member = self._members[owner_id]
        until_tick = self._next_tick - time.monotonic()
        ready = yield from self._members.parked(member, min(timeout, until_tick), fds)
        if time.monotonic() >= self._next_tick:
            self.tick()
        return ready

    def wake(self, owner_id: str) -> None:
        self._members.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        self._check_open()
        return self._members.release(owner_id, causes)

    def reap(self) -> int:
        """Give back what owners that died held; how many owners that were."""
        self._check_open()
        return self._members.reap()

    def tick(self) -> float:
        self._check_open()
        # Whoever waits looks after the dead as often as owners renew their leases.
        self._next_tick = time.monotonic() + min(_TICK, self._address.owner_lease / 3)
        self._session.look_for_upgrade()
        self.reap()
        text = f'CALL "{self._address.schema}".tick(%s, %s::"{self._address.schema}".prefs, NULL)'
        while self._session.query(text, [_PRUNE_MOST, self._session.prefs()])[0][0]:
            pass
        return _TICK

    def count_silence(self) -> float:
        self._check_open()
        return self._members.count_silence()

    # -- waiting for jobs -----------------------------------------------------------------------

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        self._check_open()
        if first:
            self.waits.for_first(ids, timeout)
        else:
            self.waits.for_jobs(ids, timeout)
        return self.get_many(ids)

    def wait_space(self, queue: str, timeout: float) -> bool:
        self._check_open()
        return self.waits.for_space(queue, timeout)

    # -- inspecting -----------------------------------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        return self.get_many([job_id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs, of one moment."""
        self._check_open()
        return inspect.get(self._session, ids)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._session.installed.born - 1 <= made <= wall_time() + 1

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        return inspect.find(self._session, what, limit, cursor)

    def stats(self) -> list[QueueStats]:
        self._check_open()
        return inspect.stats(self._session)

    def unknown_tasks(self) -> list[UnknownTask]:
        self._check_open()
        return inspect.unknown_tasks(self._session)

    def owners(self) -> list[Owner]:
        self._check_open()
        return [row.owner for row in self._members.rows()]

    def info(self) -> dict[str, Any]:
        self._check_open()
        return inspect.info(self._session)

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        self._check_open()
        return inspect.head(self._session, queue, state, count)

    # -- acting ---------------------------------------------------------------------------------

    def numbers(self, count: int) -> int:
        self._check_open()
        last = int(self._session.once("numbers", [count], "bigint", plain=True))
        return last - count + 1

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        self._check_open()
        ids = texts([job_id.replace("\0", "") for job_id in job_ids])
        arguments = [self._members[owner_id].number, ids]
        shown = self._session.once("lease_named", arguments, "int, text[]")
        return [leases_of(base64.b64decode(one))[0] if one else None for one in shown]

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        verb = "terminate" if terminate else "cancel"
        return self._act("cancel", job_ids, verb)

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        return self._act("kick", job_ids, "force" if force else "")

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self._act("delete", job_ids)

    def _act(self, name: str, job_ids: Iterable[str], *more: str) -> list[bool]:
        self._check_open()
        ids = texts([job_id.replace("\0", "") for job_id in job_ids])
        types = ", ".join(["text[]", *["text"] * len(more)])
        done: list[bool] = self._session.once(name, [ids, *more], types)
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self._check_open()
        queues = self._session.known([queue])
        arguments = [queues[queue], paused, max_size]
        types = "int, bool, bigint"
        self._session.call("set_queue", arguments, types, plain=True, queues=queues)

    def purge(self, queue: str) -> int:
        self._check_open()
        removed, place = 0, {"in": "later", "after": 0}
        while place:
            arguments = [queue, _PURGE_MOST, json(place)]
            batch, place = self._session.once("purge", arguments, "text, int, jsonb")
            removed += batch
        return removed

    def forget_queue(self, queue: str) -> bool:
        self._check_open()
        return bool(self._session.once("forget_queue", [queue], "text", plain=True))

    def recall(self) -> int:
        self._check_open()
        given, there = 0, sum(row.carried for row in self.stats())
        while given < there and (batch := self._session.once("recall", [_PURGE_MOST], "int")):
            given += batch  # not for ever: what went back may be carried again already
        return given

    def command(self, owner_id: str, command: Command) -> bool:
        self._check_open()
        arguments = [owner_id, command.verb, command.token]
        told: bool = self._session.once("send_command", arguments, "text, text, bigint", plain=True)
        return told

    def backup(self, target: str) -> None:
        raise FeatureMissing(
            "backup needs the feature backup, which postgresql:// does not have; use pg_dump"
        )

    # -- limits ---------------------------------------------------------------------------------

    def set_limit(
        self, name: str, terms: Terms | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        self._check_open()
        limits.set_limit(self._session, name, terms, queue=queue, declared=declared)

    def limits(self) -> list[LimitStats]:
        self._check_open()
        return limits.all_limits(self._session)

    def held(self, job_id: str) -> Held | None:
        self._check_open()
        return limits.held(self._session, job_id.replace("\0", ""))

    # -- schedules ------------------------------------------------------------------------------

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        self._check_open()
        return stored.get(self._session, names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        self._check_open()
        return stored.page(self._session, after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        self._check_open()
        return stored.change(self._session, changes)

    # -- moving to another store ----------------------------------------------------------------

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        self._check_open()
        return moving.depart(self._session, where, seal=seal)

    def stay(self) -> None:
        self._check_open()
        moving.stay(self._session)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        self._check_open()
        return moving.adopt(self._session, departure, records, cursor, schedules)

    def adopted(self, mark: str) -> str:
        self._check_open()
        return moving.adopted(self._session, mark)

    def close(self) -> None:
        if not self._closed and self._pid == os.getpid():
            self._members.leave()
            self._session.close()
        self._closed = True
