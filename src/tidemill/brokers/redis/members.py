"""The owners of this process: coming, going, exchanging, sleeping."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tidemill.brokers.base import Mode, Reply, Step, Want
from tidemill.brokers.conversation import Conversation
from tidemill.brokers.redis.deaths import Deaths, Watch, release_args
from tidemill.brokers.redis.lines import STEP_TIMEOUT, Lines
from tidemill.brokers.redis.record import pack_verdict, read_leases
from tidemill.brokers.redis.schedules import read_schedules
from tidemill.brokers.redis.servertime import MICRO
from tidemill.brokers.redis.sleeper import Sleeper
from tidemill.clock import new_id
from tidemill.errors import BrokerUnavailable, StoreMoved, TidemillError
from tidemill.job import Command, Owner

__all__ = ["Members", "check_moved"]

_LONGEST = 3600.0
_MODES = {Mode.FAIR: 0, Mode.STRICT: 1, Mode.MERGED: 2}
_HEAD = struct.Struct(">QQH").pack
_TOUCH = struct.Struct(">Qd").pack
_NOTE = struct.Struct(">Qddd").pack
_encode = msgspec.msgpack.Encoder().encode


class Member:
    """An owner of this process: its conversation, and where it sleeps."""

    def __init__(self, lines: Lines, owner: Owner, lease: float, watch: Watch) -> None:
        self.owner = owner
        self.watch = watch
        self.roster = b""  # how the list of owners stood at the last step
        self.epoch = new_id().encode()
        self.told = 0  # the highest token it ever had
        self._lines = lines
        self._lease = lease
        self._line = lines.new_line(STEP_TIMEOUT)
        self._talk = Conversation(self._send)
        self.sleeper = Sleeper(lines.server, lines.key + b":w:" + owner.id.encode())
        self.renew_at = 0.0
        self.death_at = float("inf")  # when the next of the others is to be given up
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)

    def exchange(self, step: Step) -> Reply:
        """One step; whatever became of it, the next one makes good for it."""
        try:
            return self._talk.exchange(step)
        except BrokerUnavailable:
            self.sleeper.close()  # its line leads to the same server
            raise

    def _send(self, step: Step, serial: int) -> Reply:
        self.sleeper.ready()  # before the store may think that it hears
        args = [
            self.owner.id.encode(),
            _HEAD(serial, self.told, len(self.epoch)) + self.epoch,
            b"%d" % int(self._lease * MICRO),
            *_pack_want(step.want, step.fires),
            b"%d" % len(step.verdicts),
        ]
        for verdict in step.verdicts:
            args += pack_verdict(verdict)
        args.append(b"%d" % len(step.touch))
        args += [_TOUCH(token, seconds) for token, seconds in step.touch]
        args.append(b"%d" % len(step.notes))
        args += [_NOTE(n.token, n.done, n.total, n.time) + n.line.encode() for n in step.notes]
        args.append(b"%d" % len(step.take))
        args += [token.to_bytes(8, "big") + job_id.encode() for token, job_id in step.take]
        head = self._lines.head((b"", b""))
        answer = self._line.run("exchange", self._lines.key, (*head, *args))
        if answer == 0:
            return _given_up(step)
        check_moved(answer)
        now = time.monotonic()
        self.renew_at = now + self._lease / 3
        return self._read(answer, step, now)

    def _read(self, answer: Any, step: Step, now: float) -> Reply:
        settled, touched, leases, commands, due, death, inputs, schedules, roster, *took = answer
        self.roster = roster or self.roster
        self.death_at = now + death / MICRO if death >= 0 else float("inf")
        taken = [flag == 49 for flag in took[0]] if took else []
        brought = [token for (token, _), mine in zip(step.take, taken, strict=True) if mine]
        lent = read_leases(leases, inputs)
        self.told = max(self.told, *[lease.token for lease in lent], *brought, 0)
        return Reply(
            [flag == 49 for flag in settled],
            [flag == 49 for flag in touched],
            lent,
            [_read_command(packed) for packed in commands],
            due / MICRO if due >= 0 else float("inf"),
            read_schedules(schedules[1:]),
            int(schedules[0]) / MICRO if schedules else 0.0,
            taken=taken,
        )

    def sleep(self, timeout: float, fds: Sequence[int]) -> tuple[list[int], bool]:
        """Until a hint, a wake, a death, a readable descriptor, a time to look, or the timeout.

        The descriptors that are readable, and whether one of those it watches has died.
        """
        limit = min(self.renew_at, self.death_at) - time.monotonic()
        watched = self.watch.fds
        ready = self.sleeper.wait(min(timeout, limit, _LONGEST), [self._wake_read, *fds], watched)
        if self._wake_read in ready:
            ready.remove(self._wake_read)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        return [fd for fd in ready if fd in fds], not set(watched).isdisjoint(ready)

    def wake(self) -> None:
        """End its sleep, from any thread."""
        with contextlib.suppress(OSError):  # full of hints already, or gone
            os.write(self._wake_write, b"x")

    def close(self) -> None:
        """Hang up."""
        self._line.close()
        self.sleeper.close()
        os.close(self._wake_read)
        os.close(self._wake_write)


class Members:
    """The members this process has in one store."""

    def __init__(self, lines: Lines, brisk: Lines, lease: float) -> None:
        """``brisk`` lines have no patience: whoever reaps has deadlines to look after."""
        self._lines = lines
        self._brisk = brisk
        self._lease = lease
        self._members: dict[str, Member] = {}
        self._deaths = Deaths(lines, brisk, self.ids)

    def __getitem__(self, owner_id: str) -> Member:
        """A member that is attached.

        Raises:
            TidemillError: it is not, or not here.
        """
        member = self._members.get(owner_id)
        if member is None:
            raise TidemillError(f"owner {owner_id!r} is not attached")
        return member

    def ids(self) -> list[str]:
        """The ids of all that are attached here."""
        return list(self._members)

    # -- coming and going -----------------------------------------------------------------------

    def attach(self, owner: Owner) -> None:
        """Make an owner known, and alive as long as it is heard of."""
        before = self._drop(owner.id)
        if before is not None:
            self._deaths.end(before.watch)
        member = Member(self._lines, owner, self._lease, self._deaths.begin(owner))
        member.told = before.told if before is not None else 0
        try:
            answer = self._call(
                *("attach", owner.id, owner.name, owner.kind),
                *(_encode(owner), b"%d" % int(self._lease * MICRO), member.epoch),
                *(b"%d" % member.watch.number, owner.host),
            )
            check_moved(answer)
            member.sleeper.ready()
        except BaseException:
            self._deaths.end(member.watch)
            member.close()
            raise
        member.renew_at = time.monotonic() + self._lease / 3
        self._members[owner.id] = member
        self.reap()

    def detach(self, owner_id: str, *, brisk: bool = False) -> None:
        """Take an owner off the list; what it held goes back uncounted."""
        member = self._drop(owner_id)
        if member is None:
            return
        lines = self._brisk if brisk else self._lines
        lines.call("owner", *release_args(owner_id, {}), once=True)
        self._deaths.end(member.watch)

    def _drop(self, owner_id: str) -> Member | None:
        member = self._members.pop(owner_id, None)
        if member is not None:
            member.close()
        return member

    def release(self, owner_id: str, causes: Mapping[int, str] | None) -> int:
        """Take an owner of any process off the list; how many leases it had."""
        return int(self._lines.call("owner", *release_args(owner_id, causes), once=True))

    def command(self, owner_id: str, command: Command) -> bool:
        """Leave a command for an owner; False when it is not there."""
        packed = command.token.to_bytes(8, "big") + command.verb.encode()
        return bool(self._call("command", owner_id, packed))

    def wake(self, owner_id: str) -> None:
        """End an owner's sleep, from any thread."""
        member = self._members.get(owner_id)
        if member:
            member.wake()

    def _call(self, verb: str, owner_id: str, *args: bytes | str) -> Any:
        encoded = [arg if isinstance(arg, bytes) else arg.encode() for arg in args]
        return self._lines.call("owner", verb.encode(), owner_id.encode(), *encoded, once=True)

    # -- deaths ---------------------------------------------------------------------------------

    def listed(self) -> list[Owner]:
        """The owners on the list, in any process."""
        return [row.owner for row in self._deaths.rows(self._lines)]

    def reap(self) -> int:
        """Give back what owners held that died; how many owners that were."""
        return self._deaths.reap()

    def sleep(self, member: Member, timeout: float, fds: Sequence[int]) -> list[int]:
        """Sleep as a member, and give back what neighbours held that died meanwhile."""
        if member.roster != member.watch.seen:
            self._deaths.watch(member.watch, member.roster)
        ready, died = member.sleep(timeout, fds)
        if died:
            self._deaths.forget(member.watch)
            self._deaths.reap()
        return ready

    def close(self) -> None:
        """Hang up all lines."""
        for member in self._members.values():
            member.close()
        self._members.clear()
        self._deaths.close()

    def after_fork_child(self) -> None:
        """In a forked child: all are the parent's; close our copies."""
        self._deaths.after_fork_child()
        self.close()


def check_moved(answer: Any) -> None:
    """Raise when a script says that the store is left for another."""
    if isinstance(answer, list) and answer[:1] == [b"moved"]:
        raise StoreMoved(f"this store moves to {answer[1].decode()}; use that url")


def _given_up(step: Step) -> Reply:
    """The owner was given up for dead: all it held is lost, and it is told so."""
    lost = [False] * len(step.verdicts), [False] * len(step.touch)
    return Reply(*lost, commands=[Command("lost")], next_due=0.0)


def _pack_want(want: Want | None, fires: int) -> list[bytes]:
    if want is None:
        return [b"", b"%d" % fires, b"0"]
    kinds = want.tasks | want.messages << 1 | (want.tasks and want.alone) << 2
    packed = want.count.to_bytes(4, "big") + bytes((_MODES[want.mode], kinds, want.sleep))
    queues = [queue.encode() for queue in dict.fromkeys(want.queues)]
    return [packed, b"%d" % fires, b"%d" % len(queues), *queues]


def _read_command(packed: bytes) -> Command:
    return Command(packed[8:].decode(), int.from_bytes(packed[:8], "big"))
