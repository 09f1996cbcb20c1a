"""The owners on the store's list, dead or alive, and the commands left for them."""

from __future__ import annotations

import lmdb
import msgspec

from tidemill.brokers.lmdb.layout import NUMBER, Tables
from tidemill.brokers.lmdb.record import encode
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.job import Command, Owner

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
    """Delete an owner and its commands.

    One owner may leave when another attaches, so the number of owners stays the same. The counter
    shows this change of the list, even if the number of the new owner was counted earlier.
    """
    commit.count_up("owners")
    commit.txn.delete(NUMBER.pack(number), db=commit.t.owner)
    take_commands(commit, number)


def send(commit: Transitions, number: int, command: Command) -> None:
    """Leave a command for an owner."""
    key = NUMBER.pack(number) + NUMBER.pack(commit.next_number())
    commit.txn.put(key, encode(command), db=commit.t.cmd)
    commit.store.wakeups.ring_owner(number)


def take_commands(commit: Transitions, number: int) -> list[Command]:
    """Take the commands for an owner off the table, and return them."""
    prefix = NUMBER.pack(number)
    cursor = commit.txn.cursor(commit.t.cmd)
    commands = []
    while cursor.set_range(prefix) and cursor.key()[: NUMBER.size] == prefix:
        commands.append(_COMMAND.decode(cursor.value()))
        cursor.delete()
    return commands
