"""``redis://``: the broker of a store on a Redis server.

This file turns each call of the seam into one function of the server's. What those do is in
``lua/``, by the names of the LMDB broker's rooms; the way to the server is in :mod:`.lines`, the
owners of this process in :mod:`.members`, those who wait in :mod:`.waits`, what is shown in
:mod:`.inspect`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import struct
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tidemill.brokers.base import Departure, Feature, Filter, Page, QueueStats, Reply, Step
from tidemill.brokers.forks import tell_of_forks
from tidemill.brokers.parking import Parked, sleep
from tidemill.brokers.redis.deaths import folder_here
from tidemill.brokers.redis.inspect import Inspection
from tidemill.brokers.redis.limits import Ledger, change
from tidemill.brokers.redis.lines import Lines
from tidemill.brokers.redis.members import Members, check_moved
from tidemill.brokers.redis.opening import open_store
from tidemill.brokers.redis.record import line_and_rank, pack_holds, pack_put, pack_record
from tidemill.brokers.redis.schedules import Book, pack_adopted, pack_changes, read_changed
from tidemill.brokers.redis.server import Server
from tidemill.brokers.redis.servertime import MICRO
from tidemill.brokers.redis.settings import Settings, check_url
from tidemill.brokers.redis.trouble import refusal
from tidemill.brokers.redis.waits import Waits
from tidemill.brokers.schedules import Change, Changed, Schedule
from tidemill.brokers.steps import check_nonce, is_lost, lost
from tidemill.brokers.unknown import UnknownTask
from tidemill.clock import id_time, new_id, wall_time
from tidemill.config import Url
from tidemill.errors import BrokerUnavailable, FeatureMissing, TidemillError
from tidemill.gate import Held, LimitStats, Terms
from tidemill.job import Command, Envelope, Lease, Owner, Placed, Put, Record, State

__all__ = ["RedisBroker", "open_url"]

log = logging.getLogger("tidemill.redis")

_PRUNE_MOST = 250
_PURGE_MOST = 200
_ACT_MOST = 250
_RECALL_MOST = 250
_GOES_ON = 2  # the answer to a change that is not carried to all keys of a limit yet
_TICK = 30.0
_PLACED = tuple(Placed)
_RETENTION = struct.Struct(">dddd")


def open_url(url: Url) -> RedisBroker:
    """The broker of a URL."""
    return RedisBroker(check_url(url))


class RedisBroker:
    """A broker on a Redis server."""

    features = frozenset(Feature) - {Feature.TRANSACTIONS, Feature.BACKUP, Feature.DRAIN}

    def __init__(self, settings: Settings) -> None:
        self.url = settings.address.shown
        self._settings = settings
        self._closed = False
        self._next_tick = 0.0
        self._doubtful = False  # an owner was unknown to the store
        self._begin()
        try:
            born, now = open_store(self._lines)
        except BaseException:
            self._lines.close()
            raise
        self._born, self._ahead = born / MICRO, now / MICRO - wall_time()
        tell_of_forks(self)

    def _begin(self) -> None:
        """Begin in this process, which may be a fork of the one that opened the broker."""
        settings, kept = self._settings, self._settings.retention
        self._pid = os.getpid()
        times = (kept.succeeded * MICRO, kept.count, kept.failed * MICRO, kept.protect * MICRO)
        key = b"{%s}" % settings.prefix.encode()
        server = Server(settings.address, key)
        retention = _RETENTION.pack(*times)
        self._lines = Lines(server, key, retention, settings.patience, settings.replicas)
        self._brisk = Lines(server, key, retention, 0.0)
        self._members = Members(self._lines, self._brisk, settings.owner_lease)
        self.waits = Waits(self._lines)
        self._inspection = Inspection(self._lines)
        self._book = Book(self._lines)
        self._ledger = Ledger(self._lines)

    def after_fork_child(self) -> None:
        """In a forked child: lines and owners are the parent's; close our copies."""
        if not self._closed:
            self._members.after_fork_child()
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
        """An act: done once, however often its reply is lost, and replicated as the URL says."""
        self._check_open()
        answer = self._lines.call(verb, *args, once=True, replicated=True)
        check_moved(answer)
        return answer

    @property
    def identity(self) -> str:
        """What tells this store from every other: when it was made, to the microsecond."""
        return f"redis {self._settings.prefix} {self._born!r}"

    @property
    def boards(self) -> str:
        """Where boards may lie: on this machine, for whoever outlives their owner here."""
        folder = os.path.join(folder_here(), "boards")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        return folder

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
            raise FeatureMissing(
                "txn= needs the feature transactions, which redis:// does not have"
            )
        check_nonce(nonce)
        if not jobs and not let_go:
            return []
        self._check_open()
        packed = pack_put(jobs)
        held = pack_holds(jobs, hold, let_go)
        plain = line_and_rank(jobs[0]) if len(jobs) == 1 and not packed[3] else None
        answer = self._lines.put(packed, plain, held, nonce)
        check_moved(answer)
        if answer == 1:
            created = Placed.CREATED
            return [Put(job.id, created) for job in jobs]
        what = answer[0]
        if isinstance(what, bytes):
            raise refusal(what, *[part.decode() for part in answer[1:] if part is not None])
        pairs = zip(answer[0::2], answer[1::2], strict=True)
        return [Put(job_id.decode(), _PLACED[placed]) for placed, job_id in pairs]

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self._check_open()
        self._members.attach(owner)

    def detach(self, owner_id: str) -> None:
        self._check_open()
        self._members.detach(owner_id)

    def exchange(self, step: Step) -> Reply:
        self._check_open()
        if step.behalf:
            return self._members.hear_behalf(step)
        member = self._members.find(step.owner) if step.serial else self._members[step.owner]
        reply = member.exchange(step) if member else lost(step)
        self._doubtful |= is_lost(reply)
        if self._doubtful:
            with contextlib.suppress(BrokerUnavailable):  # then after the next step
                self._look_for_loss()
        return reply

    def _look_for_loss(self) -> None:
        """An owner is unknown to the store: say so if that is because the store is another."""
        born, now = open_store(self._brisk)
        self._doubtful = False
        if born / MICRO != self._born:
            self._born, self._ahead = born / MICRO, now / MICRO - wall_time()
            log.error(
                "redis at %s came back without what was there: %s",
                self._lines.server.where,
                self._inspection.info(self._settings.replicas)["durability"],
            )

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        return sleep(self.parked(owner_id, timeout, fds))

    def parked(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> Parked:
        self._check_open()
        member = self._members[owner_id]
        now = time.monotonic()
        limit = max(0.0, self._next_tick - now)
        ready = yield from self._members.parked(member, min(timeout, limit), fds)
        now = time.monotonic()
        if now >= self._next_tick:
            self._tick(self._brisk)
        elif now >= member.death_at:
            member.death_at = now + 1.0  # not again before the next step, or this
            self._members.reap()
        return ready

    def wake(self, owner_id: str) -> None:
        self._members.wake(owner_id)

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        self._check_open()
        return self._members.release(owner_id, causes)

    def recall(self) -> int:
        given, there = 0, sum(row.carried for row in self.stats())
        while given < there and (batch := int(self._do(b"recall", b"%d" % _RECALL_MOST))):
            given += batch  # not for ever: what went back may be carried again already
        return given

    def reap(self) -> int:
        """Give back what owners held that are given up; how many owners that were."""
        self._check_open()
        return self._members.reap()

    def tick(self) -> float:
        self._check_open()
        self._tick(self._lines)
        return _TICK

    def count_silence(self) -> float:
        self._check_open()
        return self._members.count_silence()

    def _tick(self, lines: Lines) -> None:
        self._next_tick = time.monotonic() + _TICK
        self._members.reap()
        self._go_on(lines)

    def _go_on(self, lines: Lines) -> None:
        """What came due, what follows from it, and pruning: in pieces, to the end."""
        while lines.call("tick", b"%d" % _PRUNE_MOST):
            pass

    # -- waiting for jobs -----------------------------------------------------------------------

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

    # -- inspecting -----------------------------------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        return self.get_many([job_id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs, of one moment."""
        self._check_open()
        return self._inspection.get(ids)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        if made is None:
            return False
        apart = abs(self._ahead) + 1  # ids are made by the clocks of producers
        return bool(self._born - apart <= made <= wall_time() + apart)

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        return self._inspection.find(what, limit, cursor)

    def unknown_tasks(self) -> list[UnknownTask]:
        self._check_open()
        return self._inspection.unknown_tasks()

    def stats(self) -> list[QueueStats]:
        self._check_open()
        return self._inspection.stats()

    def owners(self) -> list[Owner]:
        self._check_open()
        return self._members.listed()

    def info(self) -> dict[str, Any]:
        self._check_open()
        told = self._inspection.info(self._settings.replicas)
        facts = {"broker": "redis", "url": self.url, **told}
        where = self._lines.ask(b"HGET", self._lines.key + b":departure", b"where")
        return facts | ({"moves_to": where.decode()} if where else {})

    def head(self, queue: str, state: State, count: int) -> list[Record]:
        self._check_open()
        return self._inspection.head(queue, state, count)

    # -- acting ---------------------------------------------------------------------------------

    def numbers(self, count: int) -> int:
        return int(self._call("named", b"", b"%d" % count)) - count + 1

    def lease_named(self, owner_id: str, job_ids: Sequence[str]) -> list[Lease | None]:
        ids = [job_id.encode() for job_id in job_ids]
        member = self._members[owner_id]
        return member.lent(self._call("named", *member.head(), *ids))

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        return self._act(b"cancel", job_ids, b"terminate" if terminate else b"cancel")

    def kick(self, job_ids: Iterable[str], *, force: bool = False) -> list[bool]:
        return self._act(b"kick", job_ids, b"force" if force else b"")

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        return self._act(b"delete", job_ids)

    def _act(self, verb: bytes, job_ids: Iterable[str], how: bytes = b"") -> list[bool]:
        done: list[bool] = []
        ids = (job_id.encode() for job_id in job_ids)
        while some := list(itertools.islice(ids, _ACT_MOST)):
            answer: bytes = self._do(verb, how, *some)
            done += [flag == 49 for flag in answer]
        return done

    def _do(self, *args: bytes) -> Any:
        """One act; what ended for it may be more than the server should do at once."""
        answer, more = self._call("act", *args)
        if more:
            self._go_on(self._lines)
        return answer

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        given = [b"" if value is None else b"%d" % value for value in (paused, max_size)]
        self._do(b"queue", queue.encode(), *given)

    def purge(self, queue: str) -> int:
        removed, place = 0, b"own"
        while place != b"end":
            batch, place = self._do(b"purge", queue.encode(), b"%d" % _PURGE_MOST, place)
            removed += int(batch)
        return removed

    def forget_queue(self, queue: str) -> bool:
        return bool(self._do(b"forget", queue.encode()))

    def command(self, owner_id: str, command: Command) -> bool:
        self._check_open()
        return self._members.command(owner_id, command)

    def backup(self, target: str) -> None:
        raise FeatureMissing("backup needs the feature backup, which redis:// does not have")

    # -- limits ---------------------------------------------------------------------------------

    def set_limit(
        self, name: str, terms: Terms | None, *, queue: bool = False, declared: bool = False
    ) -> None:
        if self._call("limit", *change(name, terms, queue=queue, declared=declared)) == _GOES_ON:
            self._go_on(self._lines)

    def limits(self) -> list[LimitStats]:
        self._check_open()
        return self._ledger.all()

    def held(self, job_id: str) -> Held | None:
        self._check_open()
        return self._ledger.held(job_id)

    # -- schedules ------------------------------------------------------------------------------

    def schedules(self, names: Sequence[str]) -> list[Schedule | None]:
        self._check_open()
        return self._book.get(names)

    def list_schedules(self, after: str = "", limit: int = 100) -> list[Schedule]:
        self._check_open()
        return self._book.page(after, limit)

    def change_schedules(self, changes: Sequence[Change]) -> list[Changed]:
        verb, args = pack_changes(changes)
        return read_changed(self._call(verb, *args))

    # -- moving to another store ----------------------------------------------------------------

    def depart(self, where: str, *, seal: bool = False) -> Departure:
        args = b"depart", new_id().encode(), where.encode(), b"1" if seal else b"0"
        while True:
            mark, goes_to, last, sealed = (part.decode() for part in self._call("move", *args))
            if sealed == "1" or not seal:
                return Departure(mark, goes_to, int(last), sealed == "1")

    def stay(self) -> None:
        self._call("move", b"stay")

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
        answer: bytes = self._call("adopt", *head, *args)
        return [flag == 49 for flag in answer]

    def adopted(self, mark: str) -> str:
        self._check_open()
        return str(self._lines.call("move", b"adopted", mark.encode()).decode())

    def close(self) -> None:
        if not self._closed:
            self._members.leave()
            self.waits.close()
            self._lines.close()
            self._brisk.close()
        self._closed = True
