"""Puts that may be repeated: the answer to each put with a nonce, for ten minutes at least.

The answers are stored by the time span in which they came, and by nonce. A finished span goes as a
whole, from the start of the table. A nonce that grows like an id is added at the table's end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import msgspec

from tidemill.brokers.contract.exchange import check_nonce
from tidemill.brokers.lmdb.layout import MICRO
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.job import Envelope, Placed, Put

__all__ = ["put_once", "sweep_nonces"]

_KEY = struct.Struct(">cI")  # then the nonce
_NONCES = b"n"
_SPAN = 300 * MICRO
_SPANS = 2  # finished spans that are kept beside the current one
_SWEEP_MOST = 20_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Put]).decode


def put_once(
    nonce: str, jobs: Sequence[Envelope], accept: Callable[[Transitions], list[Put]]
) -> Callable[[Transitions], list[Put]]:
    """A put that gets its first answer again when it is repeated."""
    check_nonce(nonce)
    name = nonce.encode()

    def once(commit: Transitions) -> list[Put]:
        span = commit.now // _SPAN
        for earlier in range(_SPANS + 1):
            data = commit.txn.get(_KEY.pack(_NONCES, span - earlier) + name, db=commit.t.said)
            if data is not None:
                return _decode(data) if data else [Put(job.id, Placed.CREATED) for job in jobs]
        puts = accept(commit)
        # An empty value stands for jobs that were all just created.
        plain = all(put.placed is Placed.CREATED for put in puts)
        commit.txn.put(
            _KEY.pack(_NONCES, span) + name, b"" if plain else _encode(puts), db=commit.t.said
        )
        return puts

    return once


def sweep_nonces(commit: Transitions) -> bool:
    """Forget answers of long ago; True when there are more than one commit should forget."""
    first = _KEY.pack(_NONCES, max(0, commit.now // _SPAN - _SPANS))
    cursor = commit.txn.cursor(commit.t.said)
    found = cursor.set_range(_NONCES)
    for _ in range(_SWEEP_MOST):
        if not found or not _NONCES < cursor.key() < first:
            return False
        cursor.delete()
        found = bool(cursor.key())
    return True
