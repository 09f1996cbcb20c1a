"""``lmdb://``: the broker of one directory on disk. Durable, many processes, no server.

This file is the conversation: it turns each call of the seam into one commit of :mod:`.moves`,
keeps the owners of this process, and sleeps. What moves a job is in :mod:`.moves`, who is alive in
:mod:`.owners`, who is woken in :mod:`.wake`, what is shown in :mod:`.inspect`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import lmdb
import msgspec

from tidemill.board import read_board
from tidemill.brokers.base import (
    Feature,
    Filter,
    Mode,
    Page,
    QueueStats,
    Reply,
    Retention,
    Step,
    Want,
    number_option,
)
from tidemill.brokers.lmdb.inspect import Inspection
from tidemill.brokers.lmdb.layout import MICRO, NUMBER
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.owners import Liveness
from tidemill.brokers.lmdb.store import MAP_SIZE, Store, close_store, open_store
from tidemill.brokers.lmdb.wake import ALL, MESSAGES, RESULT, SPACE, TASKS, Sleeper, bloom
from tidemill.clock import id_time, machine_time, wall_time
from tidemill.config import Url, check_known
from tidemill.crash import point
from tidemill.errors import InvalidOption, StoreFull, TidemillError
from tidemill.job import Command, Envelope, Owner, Put, Record

__all__ = ["LmdbBroker", "open_url"]

T = TypeVar("T")
_OPTIONS = ("durability", "keep", "keep_count", "keep_failed", "map_size")
_PRUNE_MOST = 2000


def open_url(url: Url) -> LmdbBroker:
    """The broker of an ``lmdb://`` URL: ``lmdb:///absolute`` or ``lmdb://./relative``."""
    check_known("an lmdb:// url", url.options, _OPTIONS)
    if not url.path:
        raise InvalidOption(
            f"url {url.text!r} names no directory; write lmdb://./jobs or lmdb:///var/jobs"
        )
    durability = url.options.get("durability", "full")
    if durability not in ("full", "relaxed"):
        raise InvalidOption(f"durability in the url must be full or relaxed, not {durability!r}")
    map_size = int(number_option(url.options, "map_size", MAP_SIZE))
    if map_size < 1 << 20:
        raise InvalidOption(f"map_size in the url must be at least 1048576 bytes, not {map_size}")
    folder = os.path.abspath(os.path.expanduser(url.path))
    try:
        store = open_store(folder, map_size=map_size, sync=durability == "full")
    except OSError as error:
        raise InvalidOption(f"cannot use {folder} as a store: {error.strerror}") from error
    return LmdbBroker(url.text, store, Retention.from_options(url.options))


class _Member:
    """An owner of this process: its number, and where it sleeps."""

    __slots__ = ("epoch", "last_queue", "number", "owner", "sleeper", "wake_read", "wake_write")

    def __init__(self, owner: Owner, number: int, sleeper: Sleeper) -> None:
        self.owner = owner
        self.number = number
        self.sleeper = sleeper
        self.epoch: object = None  # as of which it watches others
        self.last_queue = 0  # that a fair want was served from
        self.wake_read, self.wake_write = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        )

    def descriptors(self) -> list[int]:
        """All that it has open."""
        return [self.sleeper.fd, self.wake_read, self.wake_write]


class LmdbBroker:
    """A broker in an LMDB environment."""

    features = frozenset(Feature)

    def __init__(self, url: str, store: Store, retention: Retention | None = None) -> None:
        self.url = url
        self._retention = retention or Retention()
        self._attach_store(store)

    @classmethod
    def around(cls, env: lmdb.Environment, prefix: str) -> LmdbBroker:
        """A broker inside the caller's own environment."""
        return cls(f"lmdb://{env.path()}", Store.around(env, prefix))

    def _attach_store(self, store: Store) -> None:
        self._store = store
        self._pid = os.getpid()
        self._members: dict[str, _Member] = {}
        self._spare: list[Sleeper] = []
        self._deaths = 0
        self._next_tick = 0.0
        self._liveness = Liveness(os.path.join(store.folder, "owners"))
        store.brokers.add(self)
        self._offset, self._born = self._read_clock()
        self._inspection = Inspection(store, self)
        self._closed = False
        store.keep_ballast()

    # -- the store's own clock ------------------------------------------------------------------

    def _read_clock(self) -> tuple[float, float]:
        """The store's time is machine time plus an offset that changes only when the machine boots.

        It starts as wall time and from then on never follows it: setting the clock moves no delay
        and ends no lease (law 19). After a boot it goes on from wall time as far as that moved.
        """
        key, boot = self._store.key("clock"), _boot_id()
        wall, machine = wall_time(), machine_time()
        with self._store.writing() as txn:
            data = txn.get(key)
            clock = _CLOCK.decode(data) if data else _Clock("", 0.0, wall, 0.0, wall)
            if clock.boot == boot:
                return clock.offset, clock.born
            if data is None:
                clock.offset = wall - machine
            else:  # the machine was down; never back behind the time last noted
                last = clock.machine + clock.offset
                clock.offset = last + max(0.0, wall - clock.wall) - machine
            clock.boot, clock.wall, clock.machine = boot, wall, machine
            txn.put(key, _ENCODE(clock))
        return clock.offset, clock.born

    def _save_clock(self, moves: Moves) -> None:
        """Note how the clocks stand, for the time after the next boot."""
        clock = _Clock(_boot_id(), self._offset, wall_time(), machine_time(), self._born)
        moves.txn.put(self._store.key("clock"), _ENCODE(clock))

    def now(self) -> float:
        """The store's time in seconds."""
        return machine_time() + self._offset

    def _moves(self, store: Store, txn: lmdb.Transaction[bytes]) -> Moves:
        now, wall = int(self.now() * MICRO), int(wall_time() * MICRO)
        return Moves(store, txn, now, wall, self._retention)

    def _commit(self, apply: Callable[[Moves], T]) -> T:
        self._check_open()
        try:
            return self._store.commit(self._moves, apply)
        except StoreFull:
            if not self._store.drop_ballast():
                raise
            # Finishing work must go on; the ballast was kept for this.
            return self._store.commit(self._moves, apply)

    def _check_open(self) -> None:
        if self._closed:
            raise TidemillError("this broker is closed")
        if self._pid != os.getpid():
            self._store.ready()
            self._attach_store(self._store)

    def after_fork_child(self) -> None:
        """In a forked child: owners and sleepers are the parent's; close our copies at once.

        Else the parent would seem alive for as long as any child of it is.
        """
        self._liveness.after_fork_child()
        members = list(self._members.values())
        fds = [s.fd for s in self._spare] + [fd for m in members for fd in m.descriptors()]
        for fd in fds:
            os.close(fd)
        self._members, self._spare = {}, []

    # -- producing ------------------------------------------------------------------------------

    def put(self, jobs: Sequence[Envelope], *, txn: Any = None) -> list[Put]:
        if txn is None:
            self._check_open()
            return self._store.commit(self._moves, lambda moves: moves.put(jobs))
        self._check_open()
        with self._store.nested(txn) as inner:
            moves = self._moves(self._store, inner)
            puts = moves.put(jobs)
            moves.finish()
        return puts

    # -- owning ---------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        self.detach(owner.id)
        key = self._store.key("owners")

        def number_it(moves: Moves) -> int:
            number = moves._read_number(key) + 1
            moves.txn.put(key, NUMBER.pack(number))
            return number

        number = self._commit(number_it)
        self._liveness.hold(number)  # before anybody can see it, and never inside a transaction
        sleepers: list[Sleeper] = []

        def enlist(moves: Moves) -> None:
            if not sleepers:  # a replay finds it taken
                sleepers.append(self._store.bells.take(number))
            for other, _ in self._owner_rows(moves.txn):
                self._store.bells.ring_owner(other)  # the ring of who watches whom has changed
            moves.txn.put(NUMBER.pack(number), _ENCODE(owner), db=moves.t.owner)

        try:
            self._commit(enlist)
        except BaseException:
            self._liveness.let_go(number)
            raise
        self._members[owner.id] = _Member(owner, number, sleepers[0])
        self.reap()
        self._watch(self._members[owner.id])

    def detach(self, owner_id: str) -> None:
        self._check_open()
        member = self._members.pop(owner_id, None)
        if member is None:
            return

        def apply(moves: Moves) -> None:
            self._strike(moves, member.number, member.owner.name, {})
            moves.ring_rest()  # a hint it was given and did not follow
            self._store.bells.give_up(member.sleeper)

        self._commit(apply)
        self._liveness.let_go(member.number)
        os.close(member.wake_read)
        os.close(member.wake_write)

    @staticmethod
    def _strike(moves: Moves, number: int, name: str, causes: Mapping[int, str] | None) -> int:
        """Take an owner off the list, with its leases and commands; how many leases it had."""
        held = moves.release_owner(number, name, causes)
        prefix = NUMBER.pack(number)
        moves.txn.delete(prefix, db=moves.t.owner)
        cursor = moves.txn.cursor(moves.t.cmd)
        while cursor.set_range(prefix) and cursor.key()[:8] == prefix:
            cursor.delete()
        return held

    def _member(self, owner_id: str) -> _Member:
        self._check_open()
        member = self._members.get(owner_id)
        if member is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return member

    def exchange(self, step: Step) -> Reply:
        member = self._member(step.owner)
        return self._commit(_Exchange(self._store, member, step))

    def wait(self, owner_id: str, timeout: float, fds: Sequence[int] = ()) -> list[int]:
        member = self._member(owner_id)
        timeout = min(timeout, max(0.0, self._next_tick - time.monotonic()))
        ready = member.sleeper.wait(timeout, [member.wake_read, *fds])
        if member.wake_read in ready:
            ready.remove(member.wake_read)
            try:
                os.read(member.wake_read, 4096)
            except BlockingIOError:
                pass
        if self._deaths:
            self._deaths = 0
            self.reap()
        if time.monotonic() >= self._next_tick:
            self.tick()
        self._watch(member)
        return ready

    def wake(self, owner_id: str) -> None:
        member = self._members.get(owner_id)
        if member:
            try:
                os.write(member.wake_write, b"x")
            except (BlockingIOError, BrokenPipeError):
                pass

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        def apply(moves: Moves) -> int:
            for number, owner in self._owner_rows(moves.txn):
                if owner.id == owner_id:
                    return self._strike(moves, number, owner.name, causes)
            return 0

        return self._commit(apply)

    # -- deaths ---------------------------------------------------------------------------------

    def _watch(self, member: _Member) -> None:
        with self._store.env.begin() as txn:
            last = txn.stat(self._store.tables.owner)["entries"], txn.get(self._store.key("owners"))
            if last == member.epoch:
                return
            member.epoch = last
            others = [number for number, _ in self._owner_rows(txn)]

        def died() -> None:
            self._deaths += 1
            self.wake(member.owner.id)

        self._liveness.watch(member.number, others, died)

    def reap(self) -> int:
        """Give back what owners that died held; how many owners that were."""
        self._check_open()
        with self._store.env.begin() as txn:
            gone = [n for n, _ in self._owner_rows(txn) if not self._liveness.alive(n)]
        if not gone:
            return 0

        def apply(moves: Moves) -> int:
            reaped = 0
            for number, owner in self._owner_rows(moves.txn):
                if number in gone and not self._liveness.alive(number):
                    self._strike(moves, number, owner.name, self._causes(moves, number, owner))
                    point("store.reaping")
                    reaped += 1
            return reaped

        reaped = self._commit(apply)
        point("store.reaped")
        for number in gone:
            self._liveness.forget(number)
        return reaped

    @staticmethod
    def _causes(moves: Moves, number: int, owner: Owner) -> dict[int, str] | None:
        """What a dead owner ran: a worker's board says; a consumer runs all it has taken."""
        if owner.kind == "consumer":
            return {token: f"{owner.name} died" for token, _ in moves.leases_of(number)}
        running = read_board(owner.board) if owner.board else None
        if running is None:
            return None
        return dict.fromkeys(running, f"worker {owner.name} died with its processes")

    def _owner_rows(self, txn: lmdb.Transaction[bytes]) -> list[tuple[int, Owner]]:
        return self._inspection.owner_rows(txn)

    def tick(self) -> float:
        self._next_tick = time.monotonic() + 30.0
        self.reap()
        self._store.env.reader_check()
        self._store.keep_ballast()

        def apply(moves: Moves) -> bool:
            self._save_clock(moves)
            more = moves.come_due()
            return moves.prune(_PRUNE_MOST) >= _PRUNE_MOST or more

        while self._commit(apply):
            pass
        return 30.0

    # -- waiting for jobs -----------------------------------------------------------------------

    def _sleep_until(
        self, kind: int, bits: int, over: Callable[[Moves], bool], timeout: float
    ) -> bool:
        """Sleep until ``over`` holds in the store; False when the time is."""
        deadline = time.monotonic() + timeout
        sleeper: Sleeper | None = None
        next_due = 0.0

        def apply(moves: Moves) -> bool:
            nonlocal sleeper, next_due
            moves.come_due()
            if over(moves):
                return True
            next_due = max(0.0, moves.next_due())
            if sleeper is None:
                sleeper = self._spare.pop() if self._spare else self._store.bells.take()
            self._store.bells.mark(sleeper, kind, bits)
            return False

        try:
            while not self._commit(apply):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                assert sleeper is not None
                sleeper.wait(min(left, next_due, 30.0))
            return True
        finally:
            if sleeper is not None:
                sleeper.drain()
                self._spare.append(sleeper)

    def wait_for(self, ids: Sequence[str], timeout: float) -> list[Record | None]:
        keys = [job_id.encode() for job_id in ids]

        def over(moves: Moves) -> bool:
            for key in keys:
                stored = moves.load(key)
                if stored is not None and not stored.head.finished:
                    return False
            return True

        records = self.get_many(ids)
        if timeout > 0 and any(r is not None and not r.state.finished for r in records):
            self._sleep_until(RESULT, bloom(ids), over, timeout)
            records = self.get_many(ids)
        return records

    def wait_space(self, queue: str, timeout: float) -> bool:
        def over(moves: Moves) -> bool:
            row = moves.existing_row(queue)
            return row is None or not row.max_size or row.size < row.max_size

        return self._sleep_until(SPACE, bloom([queue]), over, timeout)

    # -- inspecting and acting: see inspect.py --------------------------------------------------

    def get(self, job_id: str) -> Record | None:
        return self.get_many([job_id])[0]

    def get_many(self, ids: Sequence[str]) -> list[Record | None]:
        """The records of several jobs, of one moment."""
        self._check_open()
        return self._inspection.get(ids)

    def was_here(self, job_id: str) -> bool:
        made = id_time(job_id)
        return made is not None and self._born - 1 <= made <= wall_time() + 1

    def find(self, what: Filter, limit: int = 100, cursor: str = "") -> Page:
        self._check_open()
        return self._inspection.find(what, limit, cursor)

    def stats(self) -> list[QueueStats]:
        self._check_open()
        return self._inspection.stats()

    def owners(self) -> list[Owner]:
        self._check_open()
        with self._store.env.begin() as txn:
            return [
                owner for number, owner in self._owner_rows(txn) if self._liveness.alive(number)
            ]

    def info(self) -> dict[str, Any]:
        self._check_open()
        return {"url": self.url, **self._inspection.info()}

    def cancel(self, job_ids: Iterable[str], *, terminate: bool = False) -> list[bool]:
        ids = list(job_ids)
        return self._commit(lambda moves: self._inspection.cancel(moves, ids, terminate=terminate))

    def kick(self, job_ids: Iterable[str]) -> list[bool]:
        ids = list(job_ids)
        return self._commit(lambda moves: self._inspection.kick(moves, ids))

    def delete(self, job_ids: Iterable[str]) -> list[bool]:
        ids = list(job_ids)
        return self._commit(lambda moves: self._inspection.delete(moves, ids))

    def set_queue(
        self, queue: str, *, paused: bool | None = None, max_size: int | None = None
    ) -> None:
        def apply(moves: Moves) -> None:
            row = moves.row(queue)
            row.paused = row.paused if paused is None else int(paused)
            row.max_size = row.max_size if max_size is None else max_size
            row.dirty = True
            self._store.bells.ring(TASKS | MESSAGES | SPACE, ALL)

        self._commit(apply)

    def purge(self, queue: str) -> int:
        removed = 0
        while batch := self._commit(lambda moves: self._inspection.purge(moves, queue, 5000)):
            removed += batch
        return removed

    def command(self, owner_id: str, command: Command) -> bool:
        return self._commit(lambda moves: self._inspection.command(moves, owner_id, command))

    def backup(self, target: str) -> None:
        self._check_open()
        self._inspection.backup(target)

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            self._closed = True
            return
        for owner_id in list(self._members):
            self.detach(owner_id)
        spare, self._spare = self._spare, []
        if spare:

            def free(_: Moves) -> None:
                for sleeper in spare:
                    self._store.bells.give_up(sleeper)

            self._commit(free)
        self._closed = True
        close_store(self._store)


class _Exchange:
    """One exchange, as the request of a commit."""

    __slots__ = ("member", "step", "store")

    def __init__(self, store: Store, member: _Member, step: Step) -> None:
        self.store = store
        self.member = member
        self.step = step

    def __call__(self, moves: Moves) -> Reply:
        step, number = self.step, self.member.number
        if moves.txn.get(NUMBER.pack(number), db=moves.t.owner) is None:
            return self._given_up()
        reply = Reply()
        more = moves.come_due()
        for note in step.notes:
            moves.note(number, note)
        if step.verdicts:
            worker = self.member.owner.name
            reply.settled = [moves.settle(number, worker, verdict) for verdict in step.verdicts]
        if step.touch:
            reply.touched = [moves.touch(number, token, seconds) for token, seconds in step.touch]
        if step.want and step.want.count:
            self._lease(moves, step.want, reply)
        moves.prune(2 * len(step.verdicts) + 2)
        reply.commands = self._commands(moves)
        reply.next_due = 0.0 if more else max(0.0, moves.next_due())
        if step.want:
            self._mark(moves, step.want, reply)
        return reply

    def _given_up(self) -> Reply:
        """The owner was given up for dead: all it held is lost, and it is told to stop."""
        lost = [False] * len(self.step.verdicts), [False] * len(self.step.touch)
        return Reply(*lost, commands=[Command("stop")])

    def _lease(self, moves: Moves, want: Want, reply: Reply) -> None:
        member = self.member
        consumer = member.owner.kind == "consumer"
        reply.leases = moves.lease(member.number, want, member.last_queue, deadlines=consumer)
        if reply.leases and want.mode is Mode.FAIR:
            member.last_queue = moves.last_queue
        if len(reply.leases) == want.count:
            moves.ring_rest(want.queues)

    def _mark(self, moves: Moves, want: Want, reply: Reply) -> None:
        """Say that the owner is about to sleep, unless it has something to do."""
        if want.sleep and len(reply.leases) < want.count:  # it has room for what comes next
            kinds = (TASKS if want.tasks else 0) | (MESSAGES if want.messages else 0)
            bits = bloom(want.queues) if want.queues else ALL
            until = (
                ALL if reply.next_due == float("inf") else moves.now + int(reply.next_due * MICRO)
            )
            self.store.bells.mark(self.member.sleeper, kinds, bits, until)
        else:
            self.store.bells.mark(self.member.sleeper, 0, 0)

    def _commands(self, moves: Moves) -> list[Command]:
        """The commands for this owner, taken off."""
        prefix = NUMBER.pack(self.member.number)
        cursor = moves.txn.cursor(moves.t.cmd)
        commands = []
        while cursor.set_range(prefix) and cursor.key()[:8] == prefix:
            commands.append(_COMMAND.decode(cursor.value()))
            cursor.delete()
        return commands


class _Clock(msgspec.Struct, array_like=True):
    boot: str
    offset: float
    wall: float
    machine: float
    born: float


def _boot_id() -> str:
    """What tells one boot of this machine from the next."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:  # macOS: the boot time serves as well
        return str(round(wall_time() - machine_time(), -2))


_ENCODE = msgspec.msgpack.Encoder().encode
_CLOCK = msgspec.msgpack.Decoder(_Clock)
_COMMAND = msgspec.msgpack.Decoder(Command)
