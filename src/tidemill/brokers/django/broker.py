"""``django://alias``: the broker in a database of a Django project.

This file has the core of the contract; :mod:`.calls` has all other calls. Each call that changes
jobs is one transaction, which excludes all other transactions of this kind. Only puts of plain jobs
need no lock.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from tidemill.brokers.contract.exchange import Reply, Step, check_nonce
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.parked_waits import Parked, sleep
from tidemill.brokers.django.caller import inside, joined, wake_on_commit
from tidemill.brokers.django.calls import (
    AdminCalls,
    HistoryCalls,
    InspectionCalls,
    LimitCalls,
    ScheduleCalls,
    TransferCalls,
)
from tidemill.brokers.django.connections import Borrowed, Connection, Unsure
from tidemill.brokers.django.due import PIECE, delete_surplus, prune, surplus
from tidemill.brokers.django.exchange import exchange, first_reads, has_nothing, renew
from tidemill.brokers.django.history import prune as prune_history
from tidemill.brokers.django.owners import AttachedOwner
from tidemill.brokers.django.put import (
    forget_nonces,
    is_plain,
    once,
    put_again,
    put_plainly,
    put_within,
)
from tidemill.brokers.django.settings import check_url, set_up
from tidemill.brokers.django.tables import Rows, in_parts
from tidemill.brokers.django.transaction import Transaction
from tidemill.brokers.rules.transitions import store_moved
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope
from tidemill.core.job import Put, Record
from tidemill.core.owner import Owner
from tidemill.core.signals import restart_on_signal
from tidemill.errors import BrokerUnavailable

T = TypeVar("T")
_TICK = 30.0
_PAUSE = 0.1  # seconds between two attempts to put


def open_url(url: Url) -> DjangoBroker:
    """Open the broker of a ``django://`` URL."""
    address = check_url(url)
    set_up(address)
    return DjangoBroker(address)


class DjangoBroker(
    InspectionCalls,
    AdminCalls,
    LimitCalls,
    ScheduleCalls,
    HistoryCalls,
    TransferCalls,
):
    """A broker in a database of a Django project."""

    features = frozenset(Feature) - {
        Feature.BACKUP,
        Feature.NAMED,
        Feature.REMOTE_OWNERS,
    }

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
        self._check_open()
        check_nonce(nonce)
        if not jobs and not let_go:
            return []
        wrapper = joined(txn, self._address.alias) or inside(self._address.alias)
        plain = is_plain(jobs, let_go) and not nonce

        def by_rules(one: Transaction) -> list[Put]:
            return once(one, nonce, lambda: put_within(one, jobs, hold, let_go)) or []

        if wrapper is not None:
            puts = put_plainly(Borrowed(wrapper), jobs) if plain else None
            return self._inside(wrapper, by_rules) if puts is None else self._woken(wrapper, puts)
        puts = self._put_plainly(jobs) if plain else None
        if puts is None:
            puts = self._put_by_rules(jobs, by_rules)
        self._ring(owners=True, waiters=False)
        return puts

    def _put_plainly(self, jobs: Sequence[Envelope]) -> list[Put] | None:
        def work(connection: Connection) -> list[Put] | None:
            return put_plainly(connection, jobs)

        def attempt() -> list[Put] | None:
            if len(jobs) == 1:
                return self._database.write_at_once(work)
            return self._database.write(work, lock=False)

        return self._surely(jobs, attempt)

    def _put_by_rules(
        self, jobs: Sequence[Envelope], work: Callable[[Transaction], list[Put]]
    ) -> list[Put]:
        return self._surely(jobs, lambda: self._change_on_time(work))

    def _surely(self, jobs: Sequence[Envelope], attempt: Callable[[], T]) -> T | list[Put]:
        """Put jobs; try again for ``patience`` seconds while an attempt fails and stores nothing.

        Raises:
            BrokerUnavailable, StoreFull: nothing was stored.
        """
        until = time.monotonic() + self._address.patience
        while True:
            try:
                return attempt()
            except Unsure as error:
                if puts := self._after_unsure(jobs):
                    return puts
                if time.monotonic() >= until:
                    raise BrokerUnavailable(str(error)) from error
            time.sleep(_PAUSE)

    def _after_unsure(self, jobs: Sequence[Envelope]) -> list[Put] | None:
        return self._change(lambda one: put_again(one, jobs))

    def _inside(self, wrapper: Any, work: Callable[[Transaction], T]) -> T:
        """Change jobs within a caller's transaction, on the caller's connection."""
        connection = Borrowed(wrapper)
        with connection.entered():
            transaction = Transaction(Rows(connection), self._database)
            transaction.come_due()
            done = work(transaction)
            transaction.jobs.flush()
        return self._woken(wrapper, done)

    def _woken(self, wrapper: Any, done: T) -> T:
        """Wake the owners once the caller's transaction is committed."""
        wake_on_commit(wrapper, lambda: self._ring(owners=True, waiters=False))
        return done

    # -- owning -------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self._check_open()
        if owner.lease:
            raise self._lacks(Feature.REMOTE_OWNERS, "an owner on another machine")
        self._owners.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._owners.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        attached = self._owners[step.owner]
        send = attached.exchange
        if attached.owner.kind == "consumer":
            send = restart_on_signal(send)  # a signal ends the wait; the step is then repeated
        reply = send(step)
        if (
            attached.owner.kind == "consumer"
            and step.want is not None
            and step.want.count
            and any(command.verb == "quiet" for command in reply.commands)
            and (departure := self._facts().departure) is not None
        ):
            raise store_moved(departure)
        return reply

    def _send(self, attached: AttachedOwner, step: Step, serial: int) -> Reply:
        patience = step.patience or min(2.0, self._address.patience)
        found = self._database.read(
            lambda connection: has_nothing(self._rows(connection), step, self._alive),
            patience=patience,
        )
        if found is not None:
            return found

        def work(transaction: Transaction) -> Reply:
            transaction.jobs.last_queue = self._last_queue
            reply = exchange(transaction, attached.owner, step, serial, self._alive)
            self._last_queue = transaction.jobs.last_queue
            return reply

        def stay(transaction: Transaction) -> None:
            renew(transaction, step.owner, self._alive)

        reply = self._change_on_time(
            work, patience=patience, also=first_reads(step), with_each=stay
        )
        attached.renewed = time.monotonic()
        return reply

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        attached = self._owners[owner_id]
        renew = self._alive / 3 - (time.monotonic() - attached.renewed)
        until_tick = self._next_tick - time.monotonic()
        timeout = max(0.0, min(timeout, self._address.poll, renew, until_tick))
        ready = yield from self._owners.parked(attached, timeout, fds)
        if time.monotonic() >= self._next_tick:
            self.tick()
        return ready

    def wake(self, owner_id: str) -> None:
        self._owners.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        self._check_open()
        return self._owners.release(owner_id, causes)

    def tick(self) -> float:
        self._check_open()
        self._next_tick = time.monotonic() + min(_TICK, self._alive / 3)
        self._owners.reap()
        while self._change_on_time(lambda one: prune(one.rows, one.jobs)):
            pass
        self._prune_surplus()
        self._change(self._tidy)
        return _TICK

    def _prune_surplus(self) -> None:
        retention = self._address.retention

        def find(connection: Connection) -> list[int]:
            now = self._database.now_of(connection.execute)
            return surplus(self._rows(connection), retention, now)

        for part in in_parts(self._database.read(find), PIECE):
            self._change(functools.partial(self._delete_surplus, part))

    def _delete_surplus(self, numbers: Sequence[int], transaction: Transaction) -> None:
        delete_surplus(transaction.rows, transaction.jobs, numbers)

    def _tidy(self, transaction: Transaction) -> None:
        rows, jobs = transaction.rows, transaction.jobs
        forget_nonces(transaction)
        prune_history(rows, jobs)
        rows.send('DELETE FROM tidemill_key WHERE place = 3 AND "until" <= %s', [jobs.now])

    # -- waiting for jobs ---------------------------------------------------------------

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        self._check_open()
        self.waits.for_jobs(ids, timeout, first=first)
        return self.get_many(ids)

    def wait_space(self, queue: str, timeout: float) -> bool:
        self._check_open()
        return self.waits.for_space(queue, timeout)

    def close(self) -> None:
        if self._closed:
            return
        self._owners.leave()
        self._closed = True
        self._database.close()
