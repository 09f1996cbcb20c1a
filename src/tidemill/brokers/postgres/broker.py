"""``postgresql://``: the broker in a PostgreSQL database.

Each call of the contract becomes one statement (see ``sql/``). :mod:`.owners` holds the owners of
this process, and :mod:`.waits` its waiters. A call that another module answers is one line here.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.exchange import Reply, Step, is_lost, lost
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import History
from tidemill.brokers.contract.inspection import Inspection
from tidemill.brokers.contract.job_numbers import JobNumbers
from tidemill.brokers.contract.limits import LimitCalls
from tidemill.brokers.contract.schedules import Schedules
from tidemill.brokers.contract.transfer import Transfer
from tidemill.brokers.postgres import inspect, limits, transfer
from tidemill.brokers.postgres import schedules as stored
from tidemill.brokers.postgres.encoding import leases_of, texts
from tidemill.brokers.postgres.exchange import settle_inside
from tidemill.brokers.postgres.grants import statements
from tidemill.brokers.postgres.history import HistoryTable
from tidemill.brokers.postgres.owners import Owners
from tidemill.brokers.postgres.put import put, put_inside
from tidemill.brokers.postgres.schema import bring_up
from tidemill.brokers.postgres.settings import Address, check_url
from tidemill.brokers.postgres.statements import Session
from tidemill.brokers.postgres.waits import Waits
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.brokers.shared.forwarded import Call, P, R, StoreCalls, by, forwarded_to
from tidemill.brokers.shared.waits import Parked
from tidemill.core.clock import clock, id_time
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope
from tidemill.core.job import Command, Lease, Put, Record, Verdict, altered_text, purged
from tidemill.errors import FeatureMissing, TidemillError

_PRUNE_MOST = 2000
_TICK = 30.0


def open_url(url: Url) -> PostgresBroker:
    return PostgresBroker(check_url(url))


def migrate_url(url: Url) -> tuple[int, int]:
    """Migrate the tables of a ``postgresql://`` URL; return the versions before and after."""
    return bring_up(check_url(url))


def grants_url(url: Url, role: str) -> list[str]:
    """The SQL that lets a role use the store of a ``postgresql://`` URL."""
    return statements(check_url(url).schema, role)


def _in_session(method: Call[P, R], run: Callable[..., R]) -> Call[P, R]:
    """A call that a function answers with statements of the session."""

    def answer(broker: PostgresBroker, **given: Any) -> R:
        broker._check_open()
        return run(broker._session, **given)

    return forwarded_to(method, answer)


class PostgresBroker(StoreCalls):
    features = frozenset(Feature) - {Feature.BACKUP}
    _owners: Owners

    def __init__(self, address: Address) -> None:
        self.url = address.shown
        self._address = address
        self._closed = False
        self._enter()
        tell_of_forks(self)

    def _enter(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        self._pid = os.getpid()
        self._next_tick = 0.0
        self._session = Session(self._address, self._heard, self._back)
        self._owners = Owners(self._session)
        self.waits = Waits(self._session)
        self._history = HistoryTable(self._session)

    def _heard(self, word: str) -> None:
        if not word[0].isdecimal():
            self.waits.heard()
        self._owners.heard(word)

    def _back(self) -> None:
        """Wake all sleepers, since notifications were lost while the connection was broken."""
        self._owners.back()
        self.waits.heard()

    def after_fork_child(self) -> None:
        if not self._closed:
            self._session.after_fork_child()
            self._owners.after_fork_child()
            self.waits.after_fork_child()

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        if self._pid != os.getpid():
            self._enter()

    def close(self) -> None:
        if not self._closed and self._pid == os.getpid():
            self._owners.leave()
            self._session.close()
        self._closed = True

    @property
    def identity(self) -> str:
        return f"postgresql {self._session.installed.store}"

    @property
    def boards(self) -> str:
        return self._owners.boards

    # -- putting, and owners -----------------------------------------------------------------------

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

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.serial or step.behalf:
            attached = self._owners.find(step.owner)
        else:
            attached = self._owners[step.owner]
        if attached is None:
            return lost(step)
        reply = attached.exchange(step)
        if step.serial and is_lost(reply) and (anew := self._owners.anew(attached)):
            attached, reply = anew, anew.exchange(step)
        if not step.behalf:
            self._owners.renewed(attached, step)
        return reply

    def settle_inside(self, owner_id: str, verdict: Verdict, txn: Any) -> bool:
        self._check_open()
        return settle_inside(self._session, self._owners[owner_id], verdict, txn)

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        attached = self._owners[owner_id]
        until_tick = self._next_tick - time.monotonic()
        ready = yield from self._owners.parked(attached, min(timeout, until_tick), fds)
        if time.monotonic() >= self._next_tick:
            self.tick()
        return ready

    def tick(self) -> float:
        self._check_open()
        # Each waiting owner looks for dead owners as often as owners renew their leases.
        self._next_tick = time.monotonic() + min(_TICK, self._address.owner_lease / 3)
        self._session.look_for_upgrade()
        self._owners.reap()
        text = f'CALL "{self._address.schema}".tick(%s, %s::"{self._address.schema}".prefs, NULL)'
        while self._session.query(text, [_PRUNE_MOST, self._session.prefs()])[0][0]:
            pass
        self._history.fold()
        return _TICK

    def numbers(self, count: int) -> int:
        self._check_open()
        last = int(self._session.once("numbers", [count], "bigint", plain=True))
        return last - count + 1

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        self._check_open()
        arguments = [self._owners[owner_id].number, _ids(job_ids)]
        shown = self._session.once("lease_named", arguments, "int, text[]")
        return [leases_of(base64.b64decode(one))[0] if one else None for one in shown]

    # -- looking -----------------------------------------------------------------------------------

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """Return the records of several jobs, read at one moment."""
        self._check_open()
        return inspect.get(self._session, ids)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._session.installed.born - 1 <= made <= clock.wall() + 1

    find = _in_session(Inspection.find, inspect.find)
    ahead = _in_session(Inspection.ahead, inspect.ahead)
    stats = _in_session(Inspection.stats, inspect.stats)
    info = _in_session(Inspection.info, inspect.info)
    head = _in_session(JobNumbers.head, inspect.head)

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

    # -- jobs and queues ---------------------------------------------------------------------------

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        verb = purged(purge) if purge else "terminate" if terminate else "cancel"
        return self._act("cancel", job_ids, verb)

    def retry(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        how = "scheduled" if only_scheduled else "force" if force else ""
        return self._act("retry", job_ids, how, repr(float(due)))

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self._act("delete", job_ids)

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        self._check_open()
        packed = None if queue is None else msgspec.msgpack.encode(queue)
        arguments = [_ids(job_ids), rank, queue, packed, altered_text(rank, queue)]
        types = "text[], bigint, text, bytea, text"
        done: list[bool] = self._session.once("alter_jobs", arguments, types)
        return done

    def _act(self, name: str, job_ids: Iterable[str], *more: str) -> list[bool]:
        self._check_open()
        types = ", ".join(["text[]", *["text"] * len(more)])
        done: list[bool] = self._session.once(name, [_ids(job_ids), *more], types)
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        self._check_open()
        queues = self._session.known([queue])
        arguments = [queues[queue], paused, max_size]
        types = "int, bool, bigint"
        self._session.call("set_queue", arguments, types, plain=True, queues=queues)

    def forget_queue(self, queue: str) -> bool:
        self._check_open()
        return bool(self._session.once("forget_queue", [queue], "text", plain=True))

    def command(self, owner_id: str, command: Command) -> bool:
        self._check_open()
        arguments = [owner_id, command.verb, command.token]
        told: bool = self._session.once("send_command", arguments, "text, text, bigint", plain=True)
        return told

    def backup(self, target: str) -> None:
        raise FeatureMissing(
            "backup needs the feature backup, which postgresql:// does not have; use pg_dump"
        )

    # -- limits, schedules, history and moves ------------------------------------------------------

    def wall(self) -> float:
        self._check_open()
        now: float = self._session.call("clock", [], "")
        return now

    set_limit = _in_session(LimitCalls.set_limit, limits.set_limit)
    held = _in_session(LimitCalls.held, limits.held)
    limits = _in_session(LimitCalls.limits, limits.all_limits)
    schedules = _in_session(Schedules.schedules, stored.get)
    list_schedules = _in_session(Schedules.list_schedules, stored.page)
    change_schedules = _in_session(Schedules.change_schedules, stored.change)
    history = by("_history", History.history, "read")
    history_kinds = by("_history", History.history_kinds, "kinds")
    keep_history = by("_history", History.keep_history, "keep")
    depart = _in_session(Transfer.depart, transfer.depart)
    stay = _in_session(Transfer.stay, transfer.stay)
    adopt = _in_session(Transfer.adopt, transfer.adopt)
    adopted = _in_session(Transfer.adopted, transfer.adopted)


def _ids(job_ids: Iterable[str]) -> Any:
    """Ids for a call; no id in the store has a zero byte."""
    return texts([job_id.replace("\0", "") for job_id in job_ids])
