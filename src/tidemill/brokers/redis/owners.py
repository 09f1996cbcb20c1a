"""The owners of this process on Redis: their steps, their sleep, and the list on the server.

While the server is away, or this process is stopped, no owner can renew its lease. So if a process
hears from the server after half a lease of silence, it gives up no owner for ``_RETURN`` seconds.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Generator, Sequence
from typing import Any

import msgspec

from tidemill.brokers.contract.exchange import Mode, Reply, Step, Want, late, lost
from tidemill.brokers.redis.connections import STEP_TIMEOUT, ServerConnections
from tidemill.brokers.redis.handoff import HandOff
from tidemill.brokers.redis.history import pack_history
from tidemill.brokers.redis.inspect import Inspection
from tidemill.brokers.redis.out_of_memory import MemoryRoom
from tidemill.brokers.redis.record import MICRO, pack_verdict, read_leases
from tidemill.brokers.redis.schedules import read_schedules
from tidemill.brokers.redis.wakeup import Wakeup
from tidemill.brokers.shared import owners as shared
from tidemill.brokers.shared.liveness import Liveness
from tidemill.brokers.shared.lost_jobs import MOST_LOOKED_AT
from tidemill.brokers.shared.owners import Causes, Ended, Proof, Row, folder_here
from tidemill.brokers.shared.remote_owners import SignOfLife
from tidemill.brokers.shared.waits import Until
from tidemill.core.clock import new_id
from tidemill.core.crash_points import point
from tidemill.core.job import Command, Lease, Note, Owner, Record
from tidemill.errors import BrokerUnavailable, StoreMoved

_LONGEST = 3600.0
_RETURN = 5.0  # seconds that living owners have to renew their leases once the server answers again

_MODES = {Mode.FAIR: 0, Mode.STRICT: 1, Mode.MERGED: 2}
_HEAD = struct.Struct(">QQQH").pack
_NAMED = struct.Struct(">QH").pack
_TOUCH = struct.Struct(">Qd").pack
_NOTE = struct.Struct(">QdddI").pack
_encode = msgspec.msgpack.Encoder().encode
_OWNER = msgspec.msgpack.Decoder(Owner)


class AttachedOwner(shared.ConnectedOwner):
    """An owner whose calls this process makes, on a connection of its own."""

    def __init__(self, owners: Owners, owner: Owner, number: int) -> None:
        super().__init__(owner, number)
        self._owners = owners
        self.list_state = b""  # the state of the list of owners at the last step
        self.epoch = b"" if owner.lease else new_id().encode()
        self.told = 0  # the highest token that the owner ever had
        # A remote owner may be gone. The ttr of a message must not begin before its consumer knows.
        self._may_be_handed = not owner.lease and owner.kind != "consumer"
        self._lines = lines = owners.lines
        self._lease = owner.lease or owners.lease
        self._line = lines.new_connection(STEP_TIMEOUT)
        self.sleeper = Wakeup(lines.server, lines.key + b":w:" + owner.id.encode())
        self._hand_off = HandOff()

    def exchange(self, step: Step) -> Reply:
        try:
            return super().exchange(step)
        except BrokerUnavailable:
            self.sleeper.close()  # the sleeper's connection leads to the same server
            raise

    def send(self, step: Step, serial: int) -> Reply:
        hand_off = self._hand_off
        if (lease := hand_off.take(step, self.sleeper.texts)) is not None:
            point("store.fetching")
            self.unsent(step)
            self.told = max(self.told, lease.token)
            return Reply(leases=[lease], next_due=0.0)  # the next step lets the owner sleep again
        self.sleeper.ready()  # subscribe before the store may list the owner as asleep
        numbers = _HEAD(serial, self.told, hand_off.heard, len(self.epoch))
        name = self.owner.id.encode(), numbers + self.epoch
        renewed = b"inf" if self.owner.lease else b"%d" % int(self._lease * MICRO)
        head = *self._lines.head((b"", b"")), *name, renewed
        hand = step.want is not None and self._may_be_handed and hand_off.may_come(step.want)

        def run(verb: str, part: Step) -> Any:
            return self._line.run_moved(verb, self._lines.key, (*head, *_pack(part, hand=hand)))

        hand_off.sent()
        answer = self._owners.room.run(step, run)
        if answer == 0:
            return lost(step)
        check_moved(answer)
        if answer[0] == b"late":
            raise late(step, int(answer[1]))
        self.renewed = time.monotonic()
        self._owners.heard(self.renewed)
        return self._read(answer, step)

    def _read(self, answer: Any, step: Step) -> Reply:
        settled, touched, leases, commands, due, inputs, schedules, state, *last = answer
        self.list_state = state or self.list_state
        behind, strays, turn = last
        self._hand_off.answered(turn, step.want)
        self.sleeper.texts.clear()  # the texts of earlier turns
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
        leases = [read_leases(one, ())[0] if one else None for one in shown]
        self.told = max(self.told, *[lease.token for lease in leases if lease], 0)
        return leases

    def parked(self, timeout: float, fds: Sequence[int]) -> Generator[Until, list[int], Ended]:
        limit = self.renewed + self._lease / 3 - time.monotonic()
        watched = self.watched_fds
        timeout = min(timeout, limit, _LONGEST)
        self._hand_off.has_waited = True
        ready = yield from self.sleeper.parked(timeout, [self._pipe.fd, *fds], watched)
        if self._pipe.fd in ready:
            self._pipe.drain()
        return [fd for fd in ready if fd in fds], not set(watched).isdisjoint(ready)

    def close(self) -> None:
        super().close()
        self._line.end()
        self.sleeper.close()

    def after_fork_child(self) -> None:
        self._line.end()
        self.sleeper.close()
        super().after_fork_child()


class Owners(shared.Owners[AttachedOwner]):
    def __init__(self, lines: ServerConnections, brisk: ServerConnections, lease: float) -> None:
        """Set up; ``brisk`` connections have no patience, since a reaper has deadlines to keep."""
        super().__init__(Liveness(None))
        self.lines = lines
        self._brisk = brisk
        self.lease = lease
        self.room = MemoryRoom(lambda: lines.server.where)
        self._store = ""  # the store of the FIFOs: the server may come back with another store
        self._heard_at = float("inf")  # when the server last answered a step
        self._trusted_at = 0.0  # from this time on, owners whose lease is over may be given up

    # -- the list -------------------------------------------------------------------------------

    def listed(self) -> list[Owner]:
        return [row.owner for row in _rows(self.lines)]

    def _rows(self) -> list[Row]:
        return _rows(self._brisk)

    def _state(self, attached: AttachedOwner) -> object:
        return attached.list_state

    def _draw(self, owner: Owner) -> int:
        self._heard_at = float("inf")
        number, store = (part.decode() for part in self.lines.call("owners", b"number", b""))
        with self._watching:
            if store != self._store:
                self._move_to(store)
        return int(number) if owner.host == socket.gethostname() else 0

    def _move_to(self, store: str) -> None:
        self._liveness.unwatch(())
        for attached in list(self._by_id.values()):  # the store before had these owners
            self._liveness.let_go(attached.number)
            attached.number = 0
        self._store = store
        self._liveness = Liveness(os.path.join(folder_here("redis"), store))

    def _make(self, owner: Owner, number: int) -> AttachedOwner:
        return AttachedOwner(self, owner, number)

    def _list(self, attached: AttachedOwner, before: AttachedOwner | None) -> None:
        owner = attached.owner
        attached.told = before.told if before is not None else 0
        answer = self._call(
            *("attach", owner.id, owner.name, owner.kind),
            *(_encode(owner), b"%d" % int(self.lease * MICRO), attached.epoch),
            *(b"%d" % attached.number, owner.host),
        )
        check_moved(answer)
        attached.sleeper.ready()

    def _let_go(self, owner_id: str, causes: Causes, proof: Proof, *, brisk: bool) -> int | None:
        lines = self._lines_for(brisk)
        kind = b"lost" if causes is None else b""
        arguments = [b"release", owner_id.encode(), kind, _condition(proof)]
        for token, cause in (causes or {}).items():
            arguments += (b"%d" % token, cause.encode())
        held = int(lines.call("owners", *arguments, once=True))
        return held if held >= 0 else None

    def _lines_for(self, brisk: bool) -> ServerConnections:
        return self._brisk if brisk else self.lines

    def _held_by(self, owner_id: str, *, brisk: bool) -> list[str]:
        held = self._lines_for(brisk).ask(b"HVALS", self.lines.key + b":l:" + owner_id.encode())
        return [job_id.decode() for job_id in held[:MOST_LOOKED_AT]]

    def _get(self, ids: Sequence[str], *, brisk: bool) -> list[Record | None]:
        return Inspection(self._lines_for(brisk)).get(ids)

    def command(self, owner_id: str, command: Command) -> bool:
        """Leave a command for an owner; False when the owner is not listed."""
        packed = command.token.to_bytes(8, "big") + command.verb.encode()
        return bool(self._call("command", owner_id, packed))

    def _call(self, verb: str, owner_id: str, *args: bytes | str) -> Any:
        encoded = [arg if isinstance(arg, bytes) else arg.encode() for arg in args]
        return self.lines.call("owners", verb.encode(), owner_id.encode(), *encoded, once=True)

    # -- remote owners --------------------------------------------------------------------------

    def _join(self, owner: Owner) -> int:
        facts = owner.name, owner.kind, _encode(owner), repr(owner.lease), str(owner.serial)
        while not (answer := self._call("join", owner.id, *facts)):
            self.release(owner.id, {})  # a local owner had this id
        check_moved(answer)
        return 0

    def _remote(self, owner_id: str) -> tuple[Owner, int] | None:
        record = self.lines.call("owners", b"resume", owner_id.encode())
        return (_OWNER.decode(record), 0) if record else None

    def _words(self) -> dict[tuple[str, int], SignOfLife]:
        told = self._brisk.call("owners", b"words", b"")
        heard: dict[tuple[str, int], SignOfLife] = {}
        for i in range(0, len(told), 4):
            owner_id, lease, words, holds = told[i : i + 4]
            word = object() if holds == b"1" else words  # an ``object()`` differs at each check
            heard[owner_id.decode(), 0] = SignOfLife(float(lease), word)
        return heard

    def hear_behalf(self, step: Step) -> Reply:
        """Do a step on behalf of a remote owner, without touching the owner's own serials."""
        head = step.owner.encode(), _HEAD(0, 0, 0, 0), b""
        answer = self.room.run(step, lambda verb, part: self.lines.call(verb, *head, *_pack(part)))
        if answer == 0:
            return lost(step)
        check_moved(answer)
        settled, touched = answer
        return Reply([flag == 49 for flag in settled], [flag == 49 for flag in touched])

    # -- trust ----------------------------------------------------------------------------------

    def heard(self, now: float) -> None:
        """Note that the server has answered a step."""
        if now - self._heard_at > self.lease / 2:
            self._trusted_at = now + _RETURN
        self._heard_at = now

    def _trusts(self) -> bool:
        now = time.monotonic()
        return now - self._heard_at <= self.lease / 2 and now >= self._trusted_at


def _rows(lines: ServerConnections) -> list[Row]:
    told = lines.call("owners", b"list", b"")
    found = [told[i : i + 3] for i in range(0, len(told), 3)]
    return [Row(_OWNER.decode(owner), int(number), late / MICRO) for owner, number, late in found]


def _condition(proof: Proof) -> bytes:
    """The condition of a release, which the store checks first."""
    if isinstance(proof, SignOfLife):
        assert isinstance(proof.word, bytes)  # a silent owner has a word
        return b"silent" + proof.word
    if proof is None:
        return b""
    return b"dead" if proof.late > 0 else b"%d" % proof.number


def check_moved(answer: Any) -> None:
    """Raise StoreMoved when an answer says that the store moves to another store."""
    if isinstance(answer, list) and answer[:1] == [b"moved"]:
        raise StoreMoved(f"this store moves to {answer[1].decode()}; use that url")


def _pack(step: Step, *, hand: bool = False) -> list[bytes]:
    args = [*_pack_want(step.want, step.fires, hand=hand), b"%d" % len(step.verdicts)]
    for verdict in step.verdicts:
        args += pack_verdict(verdict)
    args.append(b"%d" % len(step.touch))
    args += [_TOUCH(token, seconds) for token, seconds in step.touch]
    args.append(b"%d" % len(step.notes))
    args += map(_packed_note, step.notes)
    held = b"" if step.held is None else b"held" + struct.pack(f">{len(step.held)}Q", *step.held)
    return [*args, held, *pack_history(step.history)]


def _packed_note(note: Note) -> bytes:
    text = note.text.encode()
    head = _NOTE(note.token, note.done, note.total, note.time, len(text))
    return head + text + note.line.encode()


def _pack_want(want: Want | None, fires: int, *, hand: bool) -> list[bytes]:
    if want is None:
        return [b"", b"%d" % fires, b"0"]
    kinds = want.tasks | want.messages << 1 | (want.tasks and want.alone) << 2 | hand << 3
    packed = want.count.to_bytes(4, "big") + bytes((_MODES[want.mode], kinds, want.sleep))
    queues = [queue.encode() for queue in dict.fromkeys(want.queues)]
    return [packed, b"%d" % fires, b"%d" % len(queues), *queues]


def _read_command(packed: bytes) -> Command:
    return Command(packed[8:].decode(), int.from_bytes(packed[:8], "big"))
