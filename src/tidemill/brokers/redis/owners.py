"""The owners of this process: they attach, exchange, sleep and leave."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want, late, lost
from tidemill.brokers.contract.parked_waits import Parked, Until
from tidemill.brokers.network.repeated_calls import RepeatedCalls
from tidemill.brokers.redis.connections import STEP_TIMEOUT, ServerConnections
from tidemill.brokers.redis.history import pack_history
from tidemill.brokers.redis.leases import ExpiredOwners, Watch, release, release_args
from tidemill.brokers.redis.out_of_memory import MemoryRoom
from tidemill.brokers.redis.record import MICRO, pack_verdict, read_leases
from tidemill.brokers.redis.schedules import read_schedules
from tidemill.brokers.redis.wakeup import Wakeup
from tidemill.brokers.shared.remote_owners import SignOfLife, Silence
from tidemill.brokers.shared.wait_places import Asleep
from tidemill.core.clock import new_id
from tidemill.core.errors import BrokerUnavailable, StoreMoved, TidemillError
from tidemill.core.job import Lease, Note
from tidemill.core.locks import LongLock
from tidemill.core.owner import Command, Owner
from tidemill.core.wake_pipe import WakePipe

_LONGEST = 3600.0
_Ended = tuple[list[int], bool]
_MODES = {Mode.FAIR: 0, Mode.STRICT: 1, Mode.MERGED: 2}
_HEAD = struct.Struct(">QQH").pack
_NAMED = struct.Struct(">QH").pack
_TOUCH = struct.Struct(">Qd").pack
_NOTE = struct.Struct(">QdddI").pack
_encode = msgspec.msgpack.Encoder().encode
_OWNER = msgspec.msgpack.Decoder(Owner)


class LocalOwner:
    """An owner of this process: its repeated calls, and its place to sleep."""

    def __init__(
        self,
        lines: ServerConnections,
        owner: Owner,
        lease: float,
        watch: Watch,
        deaths: ExpiredOwners,
        room: MemoryRoom,
    ) -> None:
        self.owner = owner
        self._room = room
        self._deaths = deaths
        self.watch = watch
        self.owners_state = b""  # the state of the list of owners at the last step
        self.epoch = b"" if owner.lease else new_id().encode()
        self.told = 0  # the highest token that the owner ever had
        self._lines = lines
        self._lease = owner.lease or lease
        self._line = lines.new_connection(STEP_TIMEOUT)
        self._calls = RepeatedCalls(self._send)
        self._alone = LongLock()
        self.sleeper = Wakeup(lines.server, lines.key + b":w:" + owner.id.encode())
        self.asleep = Asleep()
        self.near = False  # True when the caller is in this process: its steps need no serials
        self.renew_at = 0.0
        self.death_at = float("inf")  # the time at which the next owner in the list may be given up
        self._pipe = WakePipe()

    def exchange(self, step: Step) -> Reply:
        """Make a step. If its reply is lost, the next exchange repeats the step.

        A caller that gives a serial repeats the step itself, perhaps while the first call still
        runs.
        """
        try:
            if not step.serial:
                self.near = True
                return self._calls.exchange(step)
            with self._alone:
                return self._send(step, step.serial)
        except BrokerUnavailable:
            self.sleeper.close()  # the sleeper's connection leads to the same server
            raise

    def _send(self, step: Step, serial: int) -> Reply:
        self.sleeper.ready()  # subscribe before the store may list the owner as asleep
        name = self.owner.id.encode(), _HEAD(serial, self.told, len(self.epoch)) + self.epoch
        lease = b"inf" if self.owner.lease else b"%d" % int(self._lease * MICRO)
        head = *self._lines.head((b"", b"")), *name, lease

        def send(verb: str, part: Step) -> Any:
            return self._line.run_moved(verb, self._lines.key, (*head, *_pack(part)), head[:4])

        answer = self._room.run(step, send)
        if answer == 0:
            return lost(step)
        check_moved(answer)
        if answer[0] == b"late":
            raise late(step, int(answer[1]))
        now = time.monotonic()
        self.renew_at = now + self._lease / 3
        return self._read(answer, now)

    def _read(self, answer: Any, now: float) -> Reply:
        settled, touched, leases, commands, due, death, inputs, schedules, state, *last = answer
        self.owners_state = state or self.owners_state
        trusted_at = self._deaths.heard(now)
        self.death_at = max(now + death / MICRO, trusted_at) if death >= 0 else float("inf")
        behind, strays = last
        leased = read_leases(leases, inputs)
        self.told = max(self.told, *[lease.token for lease in leased], 0)
        return Reply(
            [flag == 49 for flag in settled],
            [flag == 49 for flag in touched],
            leased,
            [_read_command(packed) for packed in commands],
            due / MICRO if due >= 0 else float("inf"),
            read_schedules(schedules),
            behind=bool(behind),
            strays=[int(token) for token in strays],
        )

    def head(self) -> tuple[bytes, bytes]:
        """The first arguments of an act for this owner: its id, its highest token, its epoch."""
        return self.owner.id.encode(), _NAMED(self.told, len(self.epoch)) + self.epoch

    def read_leases_of_act(self, shown: Sequence[Any]) -> list[Lease | None]:
        """Read the leases that an act gave this owner."""
        leases = [read_leases(one, ())[0] if one else None for one in shown]
        self.told = max(self.told, *[lease.token for lease in leases if lease], 0)
        return leases

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], _Ended]:
        """Sleep until a hint, a wake, a death, a readable descriptor, a due time, or the timeout.

        Returns the readable descriptors, and True when a watched neighbour has died.
        """
        limit = min(self.renew_at, self.death_at) - time.monotonic()
        watched = self.watch.fds
        timeout = min(timeout, limit, _LONGEST)
        ready = yield from self.sleeper.parked(timeout, [self._pipe.fd, *fds], watched)
        if self._pipe.fd in ready:
            ready.remove(self._pipe.fd)
            self._pipe.drain()
        return [fd for fd in ready if fd in fds], not set(watched).isdisjoint(ready)

    def wake(self) -> None:
        """End the owner's sleep, from any thread."""
        self._pipe.wake()

    def close(self) -> None:
        """Close the connections when no thread sleeps here."""
        self.asleep.end(self.wake)
        self._line.end()
        self.sleeper.close()
        self._pipe.close()

    def after_fork_child(self) -> None:
        """Close the copies of the connections in a forked child, where no thread sleeps."""
        self._line.end()
        self.sleeper.close()
        self._pipe.after_fork_child()


class Owners:
    """The owners of one store whose calls this process makes."""

    def __init__(self, lines: ServerConnections, brisk: ServerConnections, lease: float) -> None:
        """Set up; ``brisk`` connections have no patience, since a reaper has deadlines to keep."""
        self._lines = lines
        self._brisk = brisk
        self._lease = lease
        self._attached: dict[str, LocalOwner] = {}
        self._deaths = ExpiredOwners(lines, brisk, self.ids, lease)
        self._joining = LongLock()
        self._room = MemoryRoom(lambda: lines.server.where)
        self._silence: Silence[str] = Silence()

    def __getitem__(self, owner_id: str) -> LocalOwner:
        """An attached owner. Another process may have made a remote owner's calls until now.

        Raises:
            TidemillError: the owner is not attached, or is attached in another process.
        """
        attached = self.find(owner_id)
        if attached is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return attached

    def find(self, owner_id: str) -> LocalOwner | None:
        """An attached owner, or None."""
        return self._attached.get(owner_id) or self._go_on(owner_id)

    def ids(self) -> list[str]:
        """The ids of all owners that are attached here."""
        return list(self._attached)

    # -- attaching ------------------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """List an owner, which stays alive while it renews its owner lease."""
        if owner.lease:
            self._join(owner)
            return
        before = self._drop(owner.id)
        if before is not None:
            self._deaths.end(before.watch)
        attached = self._new_owner(owner, self._deaths.begin(owner))
        attached.told = before.told if before is not None else 0
        try:
            answer = self._call(
                *("attach", owner.id, owner.name, owner.kind),
                *(_encode(owner), b"%d" % int(self._lease * MICRO), attached.epoch),
                *(b"%d" % attached.watch.number, owner.host),
            )
            check_moved(answer)
            attached.sleeper.ready()
        except BaseException:
            self._deaths.end(attached.watch)
            attached.close()
            raise
        attached.renew_at = time.monotonic() + self._lease / 3
        self._attached[owner.id] = attached
        self.reap()

    def _new_owner(self, owner: Owner, watch: Watch) -> LocalOwner:
        return LocalOwner(self._lines, owner, self._lease, watch, self._deaths, self._room)

    # -- remote owners --------------------------------------------------------------------------

    def _join(self, owner: Owner) -> None:
        """List a remote owner, or go on with a remote owner that is listed already."""
        facts = owner.name, owner.kind, _encode(owner), repr(owner.lease), str(owner.serial)
        with self._joining:
            here = self._attached.get(owner.id)
            if here is not None and not here.owner.lease:
                self.detach(owner.id)
            while not (answer := self._call("join", owner.id, *facts)):
                self.release(owner.id, {})  # a local owner had this id
            check_moved(answer)
            self._make_calls_of(owner)

    def _go_on(self, owner_id: str) -> LocalOwner | None:
        """Make the calls of a remote owner from now on, if its id is on the list."""
        with self._joining:
            if owner_id in self._attached:  # another thread was faster
                return self._attached[owner_id]
            record = self._lines.call("owners", b"resume", owner_id.encode())
            if not record:
                return None
            attached = self._make_calls_of(_OWNER.decode(record))
            attached.wake()  # end its first wait at once, since it may have missed a hint
            return attached

    def _make_calls_of(self, owner: Owner) -> LocalOwner:
        attached = self._attached.get(owner.id)
        if attached is None:
            attached = self._new_owner(owner, Watch(0))
            attached.renew_at = time.monotonic() + owner.lease / 3
            self._attached[owner.id] = attached
        attached.owner = owner
        return attached

    def count_silence(self) -> float:
        """Give up remote owners that were silent for their owner lease; see the contract."""
        away = [m for m in list(self._attached.values()) if m.owner.lease and not m.near]
        told = self._brisk.call("owners", b"words", b"")
        heard: dict[str, SignOfLife] = {}
        for i in range(0, len(told), 4):
            owner_id, lease, words, holds = told[i : i + 4]
            word = object() if holds == b"1" else b"silent" + words
            heard[owner_id.decode()] = SignOfLife(float(lease), word)
        silent, again = self._silence.look(heard)
        for name in silent:
            unless_heard = heard[name].word
            assert isinstance(unless_heard, bytes)  # an ``object()`` differs at each check
            release(self._brisk, name, None, unless_heard)
        self._forget([attached for attached in away if attached.owner.id not in heard])
        return again

    def _forget(self, gone: Collection[LocalOwner]) -> None:
        """Close the connections of remote owners that are no longer listed.

        Removed owners may never call again. A sleeping owner is only woken, and forgotten later. An
        owner that is ``near`` is kept: its next step learns that the owner is lost.
        """
        for attached in gone:
            if not attached.asleep.end_if_empty():
                attached.wake()
                continue
            with self._joining:
                if self._attached.get(attached.owner.id) is attached:
                    self._drop(attached.owner.id)

    def hear_behalf(self, step: Step) -> Reply:
        """Do a step on behalf of a remote owner, without touching the owner's own serials."""
        head = step.owner.encode(), _HEAD(0, 0, 0), b""
        answer = self._room.run(
            step, lambda verb, part: self._lines.call(verb, *head, *_pack(part))
        )
        if answer == 0:
            return lost(step)
        check_moved(answer)
        settled, touched = answer
        return Reply([flag == 49 for flag in settled], [flag == 49 for flag in touched])

    # -- leaving --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Take local owners off the list when the broker closes; remote owners stay listed."""
        for owner_id in self.ids():
            if self._attached[owner_id].owner.lease:
                self._drop(owner_id)
            else:
                # If this fails, other processes release the owner.
                with contextlib.suppress(BrokerUnavailable):
                    self.detach(owner_id, brisk=True)

    def detach(self, owner_id: str, *, brisk: bool = False) -> None:
        """Take an owner off the list; its leases go back, and no attempt is counted."""
        attached = self._drop(owner_id)
        if attached is None:
            if any(owner.id == owner_id and owner.lease for owner in self.listed()):
                self.release(owner_id, {})
            return
        lines = self._brisk if brisk else self._lines
        lines.call("owners", *release_args(owner_id, {}), once=True)
        self._deaths.end(attached.watch)

    def _drop(self, owner_id: str) -> LocalOwner | None:
        attached = self._attached.pop(owner_id, None)
        if attached is not None:
            attached.close()
        return attached

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Take an owner of any process off the list; return the number of its leases."""
        return release(self._lines, owner_id, causes)

    def command(self, owner_id: str, command: Command) -> bool:
        """Leave a command for an owner; False when the owner is not listed."""
        packed = command.token.to_bytes(8, "big") + command.verb.encode()
        return bool(self._call("command", owner_id, packed))

    def wake(self, owner_id: str) -> None:
        """End an owner's sleep, from any thread."""
        attached = self._attached.get(owner_id)
        if attached:
            attached.wake()

    def _call(self, verb: str, owner_id: str, *args: bytes | str) -> Any:
        encoded = [arg if isinstance(arg, bytes) else arg.encode() for arg in args]
        return self._lines.call("owners", verb.encode(), owner_id.encode(), *encoded, once=True)

    # -- deaths ---------------------------------------------------------------------------------

    def listed(self) -> list[Owner]:
        """The owners on the list, in any process."""
        return [row.owner for row in self._deaths.rows(self._lines)]

    def reap(self) -> int:
        """Give back the leases of dead owners; return the number of these owners."""
        return self._deaths.reap()

    def parked(self, attached: LocalOwner, timeout: float, fds: Sequence[int]) -> Parked:
        """Sleep as an owner, and give back the leases of neighbours that died meanwhile."""
        if attached.owners_state != attached.watch.seen:
            self._deaths.watch(attached.watch, attached.owners_state)
        with attached.asleep.inside() as may:
            if not may:
                return []  # the owner was given up or attached again a moment ago
            ready, died = yield from attached.parked(timeout, fds)
        if died:
            self._deaths.forget(attached.watch)
            self._deaths.reap()
        return ready

    def close(self) -> None:
        """Close the connections of all owners."""
        for attached in list(self._attached.values()):
            attached.close()
        self._attached.clear()
        self._deaths.close()

    def after_fork_child(self) -> None:
        """In a forked child: all owners belong to the parent; close the copies."""
        self._deaths.after_fork_child()
        for attached in list(self._attached.values()):
            attached.after_fork_child()
        self._attached.clear()


def check_moved(answer: Any) -> None:
    """Raise StoreMoved when an answer says that the store moves to another store."""
    if isinstance(answer, list) and answer[:1] == [b"moved"]:
        raise StoreMoved(f"this store moves to {answer[1].decode()}; use that url")


def _pack(step: Step) -> list[bytes]:
    args = [*_pack_want(step.want, step.fires), b"%d" % len(step.verdicts)]
    for verdict in step.verdicts:
        args += pack_verdict(verdict)
    args.append(b"%d" % len(step.touch))
    args += [_TOUCH(token, seconds) for token, seconds in step.touch]
    args.append(b"%d" % len(step.notes))
    args += map(_packed_note, step.notes)
    return [*args, _pack_held(step.held), *pack_history(step.history)]


def _packed_note(note: Note) -> bytes:
    text = note.text.encode()
    head = _NOTE(note.token, note.done, note.total, note.time, len(text))
    return head + text + note.line.encode()


def _pack_held(held: Sequence[int] | None) -> bytes:
    return b"" if held is None else b"held" + struct.pack(f">{len(held)}Q", *held)


def _pack_want(want: Want | None, fires: int) -> list[bytes]:
    if want is None:
        return [b"", b"%d" % fires, b"0"]
    kinds = want.tasks | want.messages << 1 | (want.tasks and want.alone) << 2
    packed = want.count.to_bytes(4, "big") + bytes((_MODES[want.mode], kinds, want.sleep))
    queues = [queue.encode() for queue in dict.fromkeys(want.queues)]
    return [packed, b"%d" % fires, b"%d" % len(queues), *queues]


def _read_command(packed: bytes) -> Command:
    return Command(packed[8:].decode(), int.from_bytes(packed[:8], "big"))
