"""What a store knows of its owners: the list, the commands left for them, and their last replies.

A *last reply* is the last step of a remote owner, and the reply to this step. The commit of a step
writes it under the owner's number: the serial, the answers to the owner's report, and the range of
tokens of its new leases. The store answers a repeated step from the record. It looks the leases up,
so the answer has only leases that still exist. A sign of life writes the record again, unless the
record is only a moment old. By this record the count of silence
(:mod:`tidemill.brokers.shared.remote_owners`) sees signs of life.
"""

from __future__ import annotations

from collections.abc import Sequence

import lmdb
import msgspec

from tidemill.brokers.contract.exchange import Reply, Step, late
from tidemill.brokers.lmdb.layout import LEASE_KEY, LEASE_VALUE, MICRO, NUMBER, Tables, tokens_of
from tidemill.brokers.lmdb.put.workflows import inputs_of
from tidemill.brokers.lmdb.record import Flag, encode
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.brokers.shared.remote_owners import SignOfLife
from tidemill.core.job import Command, Lease, Owner

_OWNER = msgspec.msgpack.Decoder(Owner)
_COMMAND = msgspec.msgpack.Decoder(Command)


def owner_rows(txn: lmdb.Transaction[bytes], tables: Tables) -> list[tuple[int, Owner]]:
    """(number, owner) of every owner on the list."""
    return [(NUMBER.unpack(key)[0], _OWNER.decode(row)) for key, row in txn.cursor(tables.owner)]


def name_of(txn: lmdb.Transaction[bytes], tables: Tables, number: int) -> str:
    """The name of an owner for the trails of jobs (their attempts); empty if not listed."""
    data = txn.get(NUMBER.pack(number), db=tables.owner)
    return _OWNER.decode(data).name if data else ""


def is_listed(commit: Transitions, number: int) -> bool:
    """False when the owner was given up for dead."""
    return commit.txn.get(NUMBER.pack(number), db=commit.t.owner) is not None


def list_owner(commit: Transitions, number: int, owner: Owner) -> None:
    """Add an owner, and hint the other owners, since each watches its neighbours in the list."""
    if not owner.lease:
        commit.store.wakeups.ring_others(number)
    commit.txn.put(NUMBER.pack(number), encode(owner), db=commit.t.owner)


def strike_owner(commit: Transitions, number: int) -> None:
    """Delete an owner and its commands."""
    # One owner may leave when another attaches, so the number of owners stays the same. The counter
    # shows this change of the list, even if the number of the new owner was counted earlier.
    commit.count_up("owners")
    commit.txn.delete(NUMBER.pack(number), db=commit.t.owner)
    take_commands(commit, number)


def send(commit: Transitions, number: int, command: Command) -> None:
    key = NUMBER.pack(number) + NUMBER.pack(commit.next_number())
    commit.txn.put(key, encode(command), db=commit.t.cmd)
    commit.store.wakeups.ring_owner(number)


def take_commands(commit: Transitions, number: int) -> list[Command]:
    prefix = NUMBER.pack(number)
    cursor = commit.txn.cursor(commit.t.cmd)
    commands = []
    while cursor.set_range(prefix) and cursor.key()[: NUMBER.size] == prefix:
        commands.append(_COMMAND.decode(cursor.value()))
        cursor.delete()
    return commands


_OWNERS = b"o"


class LastReply(msgspec.Struct, array_like=True, omit_defaults=True):
    """The last step of an owner; times are the store's, microseconds."""

    # The reply to the step has the leases with tokens above ``before``, up to ``told``. ``slot`` is
    # the slot in which the owner was marked as asleep.

    at: int = 0
    serial: int = 0
    before: int = 0
    told: int = 0
    slot: int = 0
    settled: list[bool] = []
    touched: list[bool] = []
    commands: list[Command] = []


_decode = msgspec.msgpack.Decoder(LastReply).decode


def read_last_reply(commit: Transitions, number: int) -> LastReply:
    """The last step of an owner; a record without a serial when the owner made no step."""
    data = commit.txn.get(_OWNERS + NUMBER.pack(number), db=commit.t.said)
    return _decode(data) if data else LastReply()


def keep_last_reply(commit: Transitions, number: int, last: LastReply) -> None:
    last.at = commit.now
    commit.txn.put(_OWNERS + NUMBER.pack(number), encode(last), db=commit.t.said)


def note_attached(commit: Transitions, number: int, owner: Owner) -> None:
    """Record that an owner attached, perhaps again: a sign of life. Earlier steps are forgotten."""
    last = read_last_reply(commit, number)
    if owner.serial > last.serial:
        last = LastReply(0, owner.serial, last.told, last.told, last.slot)
    keep_last_reply(commit, number, last)


def forget_last_reply(commit: Transitions, number: int) -> None:
    commit.txn.delete(_OWNERS + NUMBER.pack(number), db=commit.t.said)


def repeat(commit: Transitions, number: int, step: Step, last: LastReply) -> Reply:
    if step.serial < last.serial:
        raise late(step, last.serial)
    keep_last_reply(commit, number, last)
    leases = [
        open_lease(commit, number, token)
        for token in tokens_of(commit.txn, commit.t, number, last.before)
        if token <= last.told
    ]
    return Reply(last.settled, last.touched, leases, last.commands, next_due=0.0)


def strays(commit: Transitions, number: int, held: Sequence[int] | None) -> list[int]:
    """Tokens of the owner's leases in the store that are not in ``held``."""
    if held is None:
        return []
    has = frozenset(held)
    return [token for token in tokens_of(commit.txn, commit.t, number) if token not in has]


def open_lease(commit: Transitions, number: int, token: int) -> Lease:
    """A lease in the store, in the form in which its owner gets it."""
    value = commit.txn.get(LEASE_KEY.pack(number, token), db=commit.t.lease)
    assert value is not None
    stored = commit.load(value[LEASE_VALUE.size :])
    assert stored is not None
    head, (_, rank, seq, leased, deadline) = stored.head, LEASE_VALUE.unpack_from(value)
    counts = head.attempt + 1, head.losses, rank, seq
    left = max(0, deadline - commit.now) / MICRO if deadline else 0.0
    times = head.timeout, leased / MICRO, left
    inputs = inputs_of(commit, stored) if head.flags & Flag.LINKED else ()
    return Lease(token, *counts, *times, stored.envelope, inputs)


def heard(
    txn: lmdb.Transaction[bytes], tables: Tables, now: int
) -> dict[tuple[str, int], SignOfLife]:
    """The last signs of life of remote owners, by id and number, for the count of their silence."""
    # The silence of a consumer does not count while the ttr (time to run) of one of its messages
    # lasts.
    words: dict[tuple[str, int], SignOfLife] = {}
    for number, owner in owner_rows(txn, tables):
        if owner.lease:
            word: object = txn.get(_OWNERS + NUMBER.pack(number), db=tables.said)
            if owner.kind == "consumer" and _holds(txn, tables, number, now):
                word = now
            words[owner.id, number] = SignOfLife(owner.lease, word)
    return words


def _holds(txn: lmdb.Transaction[bytes], tables: Tables, number: int, now: int) -> bool:
    for token in tokens_of(txn, tables, number):
        value = txn.get(LEASE_KEY.pack(number, token), db=tables.lease)
        if value and LEASE_VALUE.unpack_from(value)[4] > now:
            return True
    return False
