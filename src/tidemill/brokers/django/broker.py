"""``django://alias``: the broker in a database of a Django project.

Each call of the contract reads the rows that it needs, or applies the rules of the memory broker to
them in one transaction of the :class:`.store.Store`. A call that a function answers alone is one
line here.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tidemill.brokers.contract.admin import Admin
from tidemill.brokers.contract.exchange import Reply, Step, check_nonce
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.history import History
from tidemill.brokers.contract.inspection import Inspection, JobWaits
from tidemill.brokers.contract.job_numbers import JobNumbers
from tidemill.brokers.contract.limits import LimitCalls
from tidemill.brokers.contract.schedules import Change, Changed, Schedule, Schedules
from tidemill.brokers.contract.transfer import Departure, Transfer
from tidemill.brokers.django import history as history_rows
from tidemill.brokers.django import inspect
from tidemill.brokers.django import schedules as stored
from tidemill.brokers.django.claim import need_limited
from tidemill.brokers.django.connections import Borrowed, Unsure, inside, joined
from tidemill.brokers.django.due import PIECE, delete_surplus, prune, surplus
from tidemill.brokers.django.jobs import StoredJobs
from tidemill.brokers.django.owners import Owners
from tidemill.brokers.django.put import forget_nonces, is_plain, put_again, put_plainly, put_within
from tidemill.brokers.django.rows import SELECT
from tidemill.brokers.django.settings import Address, check_url, set_up
from tidemill.brokers.django.store import Store
from tidemill.brokers.django.tables import Rows, in_parts
from tidemill.brokers.django.waits import Waits
from tidemill.brokers.django.wakeup import OWNERS, WAITERS
from tidemill.brokers.rules import admin as rules
from tidemill.brokers.rules import limits as limit_rules
from tidemill.brokers.rules import transfer as transfer_rules
from tidemill.brokers.rules.settle import settle
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.brokers.shared.forwarded import Call, P, R, StoreCalls, by, forwarded_to
from tidemill.brokers.shared.waits import Parked
from tidemill.core.clock import id_time
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope, LimitSettings
from tidemill.core.job import Command, Put, Record, Verdict
from tidemill.errors import BrokerUnavailable, TidemillError
from tidemill.limits.arithmetic import LimitStats

T = TypeVar("T")
_TICK = 30.0
_PAUSE = 0.1  # seconds between two attempts to put
_commands = msgspec.msgpack.Decoder(list[Command])
_encode = msgspec.msgpack.Encoder().encode


def open_url(url: Url) -> DjangoBroker:
    address = check_url(url)
    set_up(address)
    return DjangoBroker(address)


def _reads(method: Call[P, R], run: Callable[..., R]) -> Call[P, R]:
    """A call that a function answers from rows."""

    def answer(broker: DjangoBroker, **given: Any) -> R:
        return broker._open().read(lambda rows: run(rows, **given))

    return forwarded_to(method, answer)


def _changes(method: Call[P, R], run: Callable[..., R], rings: str = "") -> Call[P, R]:
    """A call that a function answers in one transaction, which then wakes these sleepers."""

    def answer(broker: DjangoBroker, **given: Any) -> R:
        return broker._open().change(lambda jobs: run(jobs, **given), rings=rings)

    return forwarded_to(method, answer)


def _send_command(jobs: StoredJobs, owner_id: str, command: Command) -> bool:
    """Add a command for an owner; False when the owner is not on the list."""
    found = jobs.rows.execute("SELECT commands FROM tidemill_owner WHERE id = %s", [owner_id])
    if not found:
        return False
    raw = bytes(found[0][0])
    commands = [*(_commands.decode(raw) if raw else []), command]
    text = "UPDATE tidemill_owner SET commands = %s WHERE id = %s"
    jobs.rows.send(text, [_encode(commands), owner_id])
    return True


def _shown_limits(jobs: StoredJobs) -> list[LimitStats]:
    need_limited(jobs)
    return limit_rules.show(jobs)


class DjangoBroker(StoreCalls):
    features = frozenset(Feature) - {Feature.BACKUP, Feature.NAMED, Feature.REMOTE_OWNERS}

    _owners: Owners

    def __init__(self, address: Address) -> None:
        self.url = address.text
        self._address = address
        self._closed = False
        self._enter()
        tell_of_forks(self)

    def _enter(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        self._pid = os.getpid()
        self._next_tick = 0.0
        self._store = Store(self._address)
        self._owners = Owners(self._store)
        self.waits = Waits(self._store)

    def _open(self) -> Store:
        if self._closed:
            raise TidemillError("this broker is closed")
        if self._pid != os.getpid():
            self._enter()
        elif not self._store.name and inside(self._address.alias) is None:
            self._store.database.close()
            self._enter()
        return self._store

    def _check_open(self) -> None:
        self._open()

    def after_fork_child(self) -> None:
        if not self._closed:
            self._store.database.after_fork_child()
            self._owners.after_fork_child()

    def close(self) -> None:
        if self._closed:
            return
        self._owners.leave()
        self._closed = True
        self._store.database.close()

    @property
    def identity(self) -> str:
        return f"django {self._store.name}"

    @property
    def boards(self) -> str:
        return self._store.folder("boards")

    # -- producing ----------------------------------------------------------------------

    def put(
        self,
        jobs: Sequence[Envelope],
        *,
        txn: Any = None,
        hold: Collection[str] = (),
        let_go: Collection[str] = (),
        nonce: str = "",
    ) -> list[Put]:
        store = self._open()
        check_nonce(nonce)
        if not jobs and not let_go:
            return []
        wrapper = joined(txn, self._address.alias) or inside(self._address.alias)
        plain = is_plain(jobs, let_go) and not nonce

        def by_rules(stored: StoredJobs) -> list[Put]:
            return put_within(stored, jobs, hold, let_go, nonce)

        if wrapper is not None:
            puts = put_plainly(Borrowed(wrapper), jobs) if plain else None
            if puts is None:
                puts = store.change_within(wrapper, by_rules)
            wrapper.on_commit(functools.partial(store.ring, OWNERS), robust=True)
            return puts
        puts = self._surely(jobs, lambda: self._put_plainly(jobs)) if plain else None
        if puts is not None:
            store.ring(OWNERS)
            return puts
        return self._surely(jobs, lambda: store.change_on_time(by_rules, rings=OWNERS))

    def _put_plainly(self, jobs: Sequence[Envelope]) -> list[Put] | None:
        database = self._store.database
        if len(jobs) == 1:
            return database.write_at_once(lambda rows: put_plainly(rows, jobs))
        return database.write(lambda rows: put_plainly(rows, jobs), lock=False)

    def _surely(self, jobs: Sequence[Envelope], attempt: Callable[[], T]) -> T | list[Put]:
        """Put jobs; try again for ``patience`` seconds while an attempt stores nothing."""
        until = time.monotonic() + self._address.patience
        while True:
            try:
                return attempt()
            except Unsure as error:
                if puts := self._store.change(lambda stored: put_again(stored, jobs)):
                    return puts
                if time.monotonic() >= until:
                    raise BrokerUnavailable(str(error)) from error
            time.sleep(_PAUSE)

    # -- owning -------------------------------------------------------------------------

    def settle_inside(self, owner_id: str, verdict: Verdict, txn: Any) -> bool:
        store, wrapper = self._open(), joined(txn, self._address.alias)

        def work(jobs: StoredJobs) -> bool:
            jobs.need_beside(jobs.load(SELECT + "token > 0 AND token = %s", [verdict.token]))
            return settle(jobs, owner_id, verdict)

        done = store.change_within(wrapper, work)
        wrapper.on_commit(functools.partial(store.ring, OWNERS + WAITERS), robust=True)
        return done

    def exchange(self, step: Step) -> Reply:
        self._open()
        return self._owners[step.owner].exchange(step)

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._open()
        attached = self._owners[owner_id]
        renew = self._address.owner_lease / 3 - (time.monotonic() - attached.renewed)
        until_tick = self._next_tick - time.monotonic()
        timeout = max(0.0, min(timeout, self._address.poll, renew, until_tick))
        ready = yield from self._owners.parked(attached, timeout, fds)
        if time.monotonic() >= self._next_tick:
            self.tick()
        return ready

    def count_silence(self) -> float:
        return 3600.0

    def tick(self) -> float:
        store = self._open()
        self._next_tick = time.monotonic() + min(_TICK, self._address.owner_lease / 3)
        self._owners.reap()
        while store.change_on_time(prune):
            pass
        for part in in_parts(
            store.read(lambda rows: surplus(rows, self._address.retention)), PIECE
        ):
            store.change(functools.partial(delete_surplus, part))
        store.change(_tidy)
        return _TICK

    # -- looking ------------------------------------------------------------------------

    find = _reads(Inspection.find, inspect.find)
    ahead = _reads(Inspection.ahead, inspect.ahead)
    stats = _reads(Inspection.stats, inspect.stats)
    head = _reads(JobNumbers.head, inspect.head)
    wait_space = by("waits", JobWaits.wait_space, "for_space")

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        return self._open().read(lambda rows: inspect.get(rows, ids))

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._open().facts().born - 1 <= made <= self.wall() + 1

    def info(self) -> dict[str, Any]:
        facts = self._open().facts()
        shown = {"broker": "django", "url": self.url, "durable": True, "made": facts.born}
        shown |= {"database": self._address.alias, "poll": self._address.poll}
        shown |= self._store.read(inspect.info)
        return shown | ({"moves_to": facts.departure.where} if facts.departure else {})

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        self._open()
        self.waits.for_jobs(ids, timeout, first=first)
        return self.get_many(ids)

    # -- jobs and queues ----------------------------------------------------------------

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        def one(jobs: StoredJobs, job_id: str) -> bool:
            send = functools.partial(_send_command, jobs)
            return rules.cancel(jobs, job_id, send, terminate=terminate, purge=purge)

        return self._each(job_ids, one, OWNERS)

    def retry(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        how: dict[str, Any] = {"force": force, "due": due, "only_scheduled": only_scheduled}
        return self._each(job_ids, lambda jobs, i: rules.retry(jobs, i, **how))

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self._each(job_ids, rules.delete, OWNERS + WAITERS, deletes=True)

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        return self._each(
            job_ids, lambda jobs, i: rules.alter(jobs, i, rank, queue), OWNERS + WAITERS
        )

    def _each(
        self,
        job_ids: Iterable[str],
        act: Callable[[StoredJobs, str], bool],
        rings: str = "",
        *,
        deletes: bool = False,
    ) -> list[bool]:
        """Act on jobs in pieces, each in one transaction."""

        def work(ids: Sequence[str], jobs: StoredJobs) -> list[bool]:
            jobs.check_here(deletes=deletes)
            jobs.need_ids_and_beside(ids)
            return [act(jobs, job_id) for job_id in ids]

        store, done = self._open(), list[bool]()
        for ids in in_parts(list(job_ids), PIECE):
            done += store.change(functools.partial(work, ids), rings=rings)
        return done

    set_queue = _changes(Admin.set_queue, rules.set_queue, OWNERS + WAITERS)
    forget_queue = _changes(Admin.forget_queue, rules.forget_queue)
    command = _changes(Admin.command, _send_command, OWNERS)

    # -- limits, schedules, history and moves -------------------------------------------

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        def work(jobs: StoredJobs) -> None:
            jobs.check_here()
            limit_rules.set_limit(jobs, name, terms, queue=queue, declared=declared)

        self._open().change(work, rings=OWNERS)

    def wall(self) -> float:
        return self._open().read(Rows.now)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        def work(jobs: StoredJobs) -> list[Changed]:
            jobs.check_here()
            return stored.StoredSchedules(jobs).change(changes)

        return self._open().change_on_time(work, rings=OWNERS)

    def stay(self) -> None:
        def work(jobs: StoredJobs) -> None:
            jobs.departure = None

        self._open().change(work, rings=OWNERS + WAITERS)

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        def work(jobs: StoredJobs) -> list[bool]:
            jobs.check_here()
            jobs.need_ids([record.envelope.id for record in records])
            jobs.need_keys([record.envelope.key for record in records])
            taken = transfer_rules.adopt(jobs, departure, records, cursor)
            return taken + transfer_rules.adopt_schedules(stored.StoredSchedules(jobs), schedules)

        return self._open().change(work, rings=OWNERS + WAITERS)

    def adopted(self, mark: str) -> str:
        return self._open().facts().arrivals.get(mark, ("", 0))[0]

    held = _changes(LimitCalls.held, limit_rules.held)
    limits = _changes(LimitCalls.limits, _shown_limits)
    schedules = _reads(Schedules.schedules, stored.read)
    list_schedules = _reads(Schedules.list_schedules, stored.page)
    history = _reads(History.history, history_rows.find)
    history_kinds = _reads(History.history_kinds, history_rows.kinds)
    keep_history = _changes(History.keep_history, history_rows.keep)
    depart = _changes(Transfer.depart, transfer_rules.depart, OWNERS + WAITERS)


def _tidy(jobs: StoredJobs) -> None:
    """Forget old numbers by period, old answers to puts, and keys whose period is over."""
    forget_nonces(jobs)
    history_rows.prune(jobs)
    text = 'DELETE FROM tidemill_key WHERE place = 3 AND "until" <= %s'
    jobs.rows.send(text, [jobs.now])
