"""The last word of each owner elsewhere, and how it was answered.

It is kept under the owner's number, in the commit of the step: the serial, what was said of what it
handed in, and between which tokens the leases lie that it got. A repetition is answered from that;
the leases are looked up, so those that were lost meanwhile are left out. Every word writes the
record anew, so who counts the silence (:mod:`tidemill.brokers.silence`) sees that there was one.
"""

from __future__ import annotations

from collections.abc import Sequence

import lmdb
import msgspec

from tidemill.brokers.base import Reply, Step
from tidemill.brokers.lmdb.flows import inputs_of
from tidemill.brokers.lmdb.layout import LEASE_KEY, LEASE_VALUE, MICRO, NUMBER, Tables
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.roster import owner_rows
from tidemill.brokers.silence import Heard
from tidemill.brokers.steps import late
from tidemill.job import Command, Lease, Owner

__all__ = [
    "Said",
    "forget_said",
    "heard",
    "keep_said",
    "note_attached",
    "open_lease",
    "read_said",
    "repeat",
]

_OWNERS = b"o"


class Said(msgspec.Struct, array_like=True, omit_defaults=True):
    """The last step of an owner; times are the store's, microseconds.

    What it was told of by then are tokens up to ``told``; those beyond ``before`` by this step.
    ``slot`` is where it was marked as asleep.
    """

    at: int = 0
    serial: int = 0
    before: int = 0
    told: int = 0
    slot: int = 0
    settled: list[bool] = []
    touched: list[bool] = []
    taken: list[bool] = []
    commands: list[Command] = []


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Said).decode


def read_said(moves: Moves, number: int) -> Said:
    """What an owner said last; of one that said nothing a record without a serial."""
    data = moves.txn.get(_OWNERS + NUMBER.pack(number), db=moves.t.said)
    return _decode(data) if data else Said()


def keep_said(moves: Moves, number: int, said: Said) -> None:
    """This is its last word, and it was now."""
    said.at = moves.now
    moves.txn.put(_OWNERS + NUMBER.pack(number), _encode(said), db=moves.t.said)


def note_attached(moves: Moves, number: int, owner: Owner) -> None:
    """It attached, perhaps once more: that is a word, and says which steps are over."""
    said = read_said(moves, number)
    if owner.serial > said.serial:
        said = Said(0, owner.serial, said.told, said.told, said.slot)
    keep_said(moves, number, said)


def forget_said(moves: Moves, number: int) -> None:
    """It is off the list."""
    moves.txn.delete(_OWNERS + NUMBER.pack(number), db=moves.t.said)


def repeat(moves: Moves, number: int, step: Step, said: Said) -> Reply:
    """The answer to a step that was done before.

    Raises:
        TidemillError: it is not the last one.
    """
    if step.serial < said.serial:
        raise late(step, said.serial)
    keep_said(moves, number, said)
    came = {token for token, _ in step.take}  # their messages brought them, not this reply
    leases = [
        open_lease(moves, number, token)
        for token in _tokens(moves.txn, moves.t, number)
        if said.before < token <= said.told and token not in came
    ]
    answer = said.settled, said.touched, leases, said.commands
    return Reply(*answer, next_due=0.0, taken=said.taken)


def strays(moves: Moves, number: int, held: Sequence[int] | None) -> list[int]:
    """Tokens of leases that are the owner's in the store, and that are not in ``held``."""
    if held is None:
        return []
    has = frozenset(held)
    return [token for token in _tokens(moves.txn, moves.t, number) if token not in has]


def _tokens(txn: lmdb.Transaction[bytes], tables: Tables, number: int) -> list[int]:
    cursor = txn.cursor(tables.lease)
    found = cursor.set_range(LEASE_KEY.pack(number, 0))
    tokens = []
    while found:
        owner, token = LEASE_KEY.unpack(cursor.key())
        if owner != number:
            break
        tokens.append(token)
        found = cursor.next()
    return tokens


def open_lease(moves: Moves, number: int, token: int) -> Lease:
    """A lease that stands, as it is told to its owner."""
    value = moves.txn.get(LEASE_KEY.pack(number, token), db=moves.t.lease)
    assert value is not None
    stored = moves.load(value[LEASE_VALUE.size :])
    assert stored is not None
    head, (_, rank, seq, leased, deadline) = stored.head, LEASE_VALUE.unpack_from(value)
    counts = head.attempt + 1, head.losses, rank, seq
    left = max(0, deadline - moves.now) / MICRO if deadline else 0.0
    times = head.timeout, leased / MICRO, left
    return Lease(token, *counts, *times, stored.envelope, inputs_of(moves, stored))


def heard(txn: lmdb.Transaction[bytes], tables: Tables, now: int) -> dict[int, Heard]:
    """By number: what the silence of each owner elsewhere is counted by.

    It is not counted while the ttr of a message runs that a consumer holds.
    """
    words: dict[int, Heard] = {}
    for number, owner in owner_rows(txn, tables):
        if owner.lease:
            word: object = txn.get(_OWNERS + NUMBER.pack(number), db=tables.said)
            if owner.kind == "consumer" and _holds(txn, tables, number, now):
                word = now
            words[number] = Heard(owner.lease, word)
    return words


def _holds(txn: lmdb.Transaction[bytes], tables: Tables, number: int, now: int) -> bool:
    for token in _tokens(txn, tables, number):
        value = txn.get(LEASE_KEY.pack(number, token), db=tables.lease)
        if value and LEASE_VALUE.unpack_from(value)[4] > now:
            return True
    return False
