"""``redis://``: the broker of a store on a Redis server.

Each call of the contract runs one function on the server: see ``lua/``. :mod:`.connections`
connects to the server, :mod:`.owners` holds the owners of this process. A call that a part of the
broker answers is one line here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tidemill.brokers.contract import inspection
from tidemill.brokers.contract.admin import Admin
from tidemill.brokers.contract.exchange import Reply, Step, check_nonce, is_lost, lost
from tidemill.brokers.contract.features import Feature, lacks
from tidemill.brokers.contract.history import History
from tidemill.brokers.contract.job_numbers import JobNumbers
from tidemill.brokers.contract.limits import LimitCalls
from tidemill.brokers.contract.schedules import Change, Changed, Schedule, Schedules
from tidemill.brokers.contract.transfer import Departure
from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.errors import refusal
from tidemill.brokers.redis.failover import Server
from tidemill.brokers.redis.history import HistoryTable
from tidemill.brokers.redis.inspect import Inspection
from tidemill.brokers.redis.limits import Ledger, change
from tidemill.brokers.redis.open import open_store
from tidemill.brokers.redis.owners import Owners, check_moved
from tidemill.brokers.redis.record import MICRO, pack_holds, pack_plain, pack_put, pack_record
from tidemill.brokers.redis.schedules import Book, pack_adopted, pack_changes, read_changed
from tidemill.brokers.redis.settings import Settings, check_url
from tidemill.brokers.redis.waits import Waits
from tidemill.brokers.shared.after_fork import tell_of_forks
from tidemill.brokers.shared.folded_history import FOLD_MOST
from tidemill.brokers.shared.forwarded import StoreCalls, by
from tidemill.brokers.shared.owners import folder_here
from tidemill.brokers.shared.waits import Parked
from tidemill.core.clock import clock, id_time, new_id
from tidemill.core.config import Url
from tidemill.core.envelope import Envelope, LimitSettings
from tidemill.core.job import Lease, Placed, Put, Record, purged
from tidemill.errors import BrokerUnavailable, TidemillError

log = logging.getLogger("tidemill.redis")

_TICK = 30.0
_PLACED = tuple(Placed)
_PRUNE_MOST = 250
_ACT_MOST = 250
_RETENTION = struct.Struct(">dddd")
_GOES_ON = 2  # the answer when some keys of a limit still have old settings
_CHANGED = b"1"[0]


def open_url(url: Url) -> RedisBroker:
    return RedisBroker(check_url(url))


class RedisBroker(StoreCalls):
    features = frozenset(Feature) - {Feature.TRANSACTIONS, Feature.BACKUP}
    _owners: Owners

    def __init__(self, settings: Settings) -> None:
        self.url = settings.address.shown
        self._settings = settings
        self._closed = False
        self._next_tick = 0.0
        self._doubtful = False  # True when the store did not know an owner
        self._begin()
        try:
            born, now = open_store(self._lines)
        except BaseException:
            self._lines.close()
            raise
        self._born, self._ahead = born / MICRO, now / MICRO - clock.wall()
        tell_of_forks(self)

    def _begin(self) -> None:
        """Prepare for this process, which may be a fork of the process that opened the broker."""
        settings, kept = self._settings, self._settings.retention
        self._pid = os.getpid()
        times = (kept.succeeded * MICRO, kept.count, kept.failed * MICRO, kept.protect * MICRO)
        key = b"{%s}" % settings.prefix.encode()
        server = Server(settings.address, key)
        retention = _RETENTION.pack(*times)
        self._lines = ServerConnections(
            server, key, retention, settings.patience, settings.replicas
        )
        self._brisk = ServerConnections(server, key, retention, 0.0)
        self._owners = Owners(self._lines, self._brisk, settings.owner_lease)
        self.waits = Waits(self._lines)
        self._inspection = Inspection(self._lines)
        self._book = Book(self._lines)
        self._ledger = Ledger(self._lines)
        self._history = HistoryTable(self._lines)

    def after_fork_child(self) -> None:
        if not self._closed:
            self._owners.after_fork_child()
            self.waits.after_fork_child()
            self._lines.close()
            self._brisk.close()
            known = self._lines.server.nodes
            self._begin()
            self._lines.server.learn(known)

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")

    def _call(self, verb: str, *args: bytes) -> Any:
        """Run a verb once, even if replies are lost; wait for replicas as configured."""
        self._check_open()
        answer = self._lines.call(verb, *args, once=True, replicated=True)
        check_moved(answer)
        return answer

    def _do(self, *args: bytes, function: str = "admin") -> Any:
        """Run an admin call. If the call ends many jobs, later calls end the rest in pieces."""
        answer, more = self._call(function, *args)
        if more:
            self._go_on(self._lines)
        return answer

    def _go_on(self, lines: ServerConnections) -> None:
        """Move due jobs, start their dependents, and prune, in pieces, until nothing is left."""
        while lines.call("housekeeping", b"%d" % _PRUNE_MOST):
            pass

    def close(self) -> None:
        if not self._closed:
            self._owners.leave()
            self.waits.close()
            self._lines.close()
            self._brisk.close()
        self._closed = True

    @property
    def identity(self) -> str:
        """The name of this store: its prefix, and its time of creation to the microsecond."""
        return f"redis {self._settings.prefix} {self._born!r}"

    @property
    def boards(self) -> str:
        """The folder of scoreboards on this machine, which other processes read after a death."""
        return folder_here("redis", "boards")

    # -- putting, and owners ----------------------------------------------------------------------

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
        if nonce:
            check_nonce(nonce)
        if not jobs and not let_go:
            return []
        self._check_open()
        plain = pack_plain(jobs[0]) if len(jobs) == 1 and not hold and not let_go else None

        def pack() -> list[bytes]:
            return [b"%d" % len(jobs), *pack_put(jobs), *pack_holds(jobs, hold, let_go)]

        return _puts(jobs, self._lines.put(plain, pack, nonce))

    command = by("_owners", Admin.command)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.behalf:
            return self._owners.hear_behalf(step)
        attached = self._owners.find(step.owner) if step.serial else self._owners[step.owner]
        reply = attached.exchange(step) if attached else lost(step)
        self._doubtful |= is_lost(reply)
        self._history.unfolded += len(step.history)
        if self._doubtful:
            with contextlib.suppress(BrokerUnavailable):  # if this fails, the next step tries again
                self._look_for_loss()
        return reply

    def _look_for_loss(self) -> None:
        """Log an error if the server has another store now. Runs after an owner was unknown."""
        born, now = open_store(self._brisk)
        self._doubtful = False
        if born / MICRO != self._born:
            self._born, self._ahead = born / MICRO, now / MICRO - clock.wall()
            log.error(
                "redis at %s has lost its store: another store is in its place: %s",
                self._lines.server.where,
                self._inspection.info(self._settings.replicas)["durability"],
            )

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        attached = self._owners[owner_id]
        limit = max(0.0, self._next_tick - time.monotonic())
        ready = yield from self._owners.parked(attached, min(timeout, limit), fds)
        if time.monotonic() >= self._next_tick:
            self._tick(self._brisk)
        if self._history.unfolded >= FOLD_MOST:
            self._history.fold()
        return ready

    def tick(self) -> float:
        self._check_open()
        self._tick(self._lines)
        return _TICK

    def _tick(self, lines: ServerConnections) -> None:
        # Each waiting owner looks for dead owners as often as owners renew their leases.
        self._next_tick = time.monotonic() + min(_TICK, self._settings.owner_lease / 3)
        self._owners.reap()
        self._go_on(lines)
        self._history.fold()

    def numbers(self, count: int) -> int:
        return int(self._call("job_numbers", b"", b"%d" % count)) - count + 1

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        ids = [job_id.encode() for job_id in job_ids]
        attached = self._owners[owner_id]
        return attached.read_leases_of_act(self._call("job_numbers", *attached.head(), *ids))

    # -- looking ----------------------------------------------------------------------------------

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs; one call reads up to 1000 of them at one moment."""
        self._check_open()
        return self._inspection.get(ids)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        if made is None:
            return False
        apart = abs(self._ahead) + 1  # producers make ids by their own clocks
        return bool(self._born - apart <= made <= clock.wall() + apart)

    find = by("_inspection", inspection.Inspection.find)
    ahead = by("_inspection", inspection.Inspection.ahead)
    stats = by("_inspection", inspection.Inspection.stats)
    head = by("_inspection", JobNumbers.head)

    def info(self) -> dict[str, Any]:
        self._check_open()
        told = self._inspection.info(self._settings.replicas)
        facts = {"broker": "redis", "url": self.url, "made": self._born, **told}
        where = self._lines.ask(b"HGET", self._lines.key + b":departure", b"where")
        return facts | ({"moves_to": where.decode()} if where else {})

    def wait_for(
        self, ids: Sequence[str], timeout: float, *, first: bool = False
    ) -> list[Record | None]:
        records = self.get_many(ids)
        going_on = [i for i, r in zip(ids, records, strict=True) if r and not r.state.finished]
        if timeout > 0 and going_on and not (first and len(going_on) < len(ids)):
            verb = b"first" if first else b"jobs"
            self.waits.until(verb, [job_id.encode() for job_id in going_on], timeout)
            records = self.get_many(ids)
        return records

    def wait_space(self, queue: str, timeout: float) -> bool:
        self._check_open()
        return self.waits.until(b"space", [queue.encode()], timeout)

    # -- jobs and queues --------------------------------------------------------------------------

    def cancel(
        self, job_ids: Iterable[str], *, terminate: bool = False, purge: str = ""
    ) -> list[bool]:
        how = purged(purge) if purge else "terminate" if terminate else "cancel"
        return self._act(b"cancel", job_ids, how.encode())

    def retry(
        self,
        job_ids: Iterable[str],
        *,
        force: bool = False,
        due: float = 0.0,
        only_scheduled: bool = False,
    ) -> list[bool]:
        return self._act(
            b"retry", job_ids, b"%d %d" % (2 if only_scheduled else force, due * MICRO)
        )

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self._act(b"delete", job_ids)

    def alter(
        self, job_ids: Iterable[str], *, rank: int | None = None, queue: str | None = None
    ) -> list[bool]:
        how = b"%b %b" % (b"" if rank is None else b"%d" % rank, (queue or "").encode())
        return self._act(b"alter", job_ids, how)

    def _act(self, verb: bytes, job_ids: Iterable[str], how: bytes = b"") -> list[bool]:
        done: list[bool] = []
        ids = [job_id.encode() for job_id in job_ids]
        while some := ids[len(done) : len(done) + _ACT_MOST]:
            answer: bytes = self._do(verb, how, *some)  # one call may act only on the first jobs
            done += [flag == _CHANGED for flag in answer]
        return done

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        given = [b"" if value is None else b"%d" % value for value in (paused, max_size)]
        self._do(b"queue", queue.encode(), *given)

    def forget_queue(self, queue: str) -> bool:
        return bool(self._do(b"forget", queue.encode()))

    # -- limits, schedules, history and moves -----------------------------------------------------

    def set_limit(
        self, name: str, terms: LimitSettings | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        args = change(name, terms, queue=queue, declared=declared)
        if self._call("set_limit", *args) == _GOES_ON:
            self._go_on(self._lines)

    limits = by("_ledger", LimitCalls.limits, "all")
    held = by("_ledger", LimitCalls.held)
    history = by("_history", History.history, "read")
    history_kinds = by("_history", History.history_kinds, "kinds")
    keep_history = by("_history", History.keep_history, "keep")
    schedules = by("_book", Schedules.schedules, "get")
    list_schedules = by("_book", Schedules.list_schedules, "page")

    def wall(self) -> float:
        self._check_open()
        seconds, micros = map(int, self._lines.ask(b"TIME"))
        return seconds + micros / MICRO + clock.server_ahead()

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        verb, args = pack_changes(changes)
        return read_changed(self._call(verb, *args))

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        args = b"depart", new_id().encode(), where.encode(), b"1" if seal else b"0"
        while True:
            mark, goes_to, last, sealed = (part.decode() for part in self._call("transfer", *args))
            if sealed == "1" or not seal:
                return Departure(mark, goes_to, int(last), sealed == "1")

    def stay(self) -> None:
        self._call("transfer", b"stay")

    def adopt(
        self,
        departure: Departure,
        records: Sequence[Record],
        cursor: str,
        schedules: Sequence[Schedule] = (),
    ) -> list[bool]:
        args = pack_adopted(schedules)
        args += [arg for record in records for arg in pack_record(record)]
        head = departure.mark.encode(), b"%d" % departure.last, cursor.encode()
        answer: bytes = self._call("transfer_in", *head, *args)
        return [flag == _CHANGED for flag in answer]

    def adopted(self, mark: str) -> str:
        self._check_open()
        return str(self._lines.call("transfer", b"adopted", mark.encode()).decode())


def _puts(jobs: Sequence[Envelope], answer: Any) -> list[Put]:
    """The outcome of a put, from the server's answer."""
    if answer == 1:
        created = Placed.CREATED
        return [Put(job.id, created) for job in jobs]
    check_moved(answer)
    what = answer[0]
    if isinstance(what, bytes):
        raise refusal(what, *[part.decode() for part in answer[1:] if part is not None])
    pairs = zip(answer[0::2], answer[1::2], strict=True)
    return [Put(job_id.decode(), _PLACED[placed]) for placed, job_id in pairs]
