"""Puts that may be repeated: what each with a nonce was told, for ten minutes at least.

They lie under the span of time they came in, and their nonce. Spans that are over go as a whole,
from the start of the table; an own id as nonce adds at its end.
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
_SPANS = 2  # beside the one that runs
_SWEEP_MOST = 20_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Put]).decode


def put_once(
    nonce: str, jobs: Sequence[Envelope], accept: Callable[[Transitions], list[Put]]
) -> Callable[[Transitions], list[Put]]:
    """A put that is answered as the first was, when it comes again."""
    check_nonce(nonce)
    name = nonce.encode()

    def once(commit: Transitions) -> list[Put]:
        span = commit.now // _SPAN
        for earlier in range(_SPANS + 1):
            data = commit.txn.get(_KEY.pack(_NONCES, span - earlier) + name, db=commit.t.said)
            if data is not None:
                return _decode(data) if data else [Put(job.id, Placed.CREATED) for job in jobs]
        puts = accept(commit)
        # Of jobs that were all just created nothing is written but that they were.
        plain = all(put.placed is Placed.CREATED for put in puts)
        commit.txn.put(
            _KEY.pack(_NONCES, span) + name, b"" if plain else _encode(puts), db=commit.t.said
        )
        return puts

    return once


def sweep_nonces(commit: Transitions) -> bool:
    """Forget those of long ago; True when there are more than one commit should forget."""
    first = _KEY.pack(_NONCES, max(0, commit.now // _SPAN - _SPANS))
    cursor = commit.txn.cursor(commit.t.said)
    found = cursor.set_range(_NONCES)
    for _ in range(_SWEEP_MOST):
        if not found or not _NONCES < cursor.key() < first:
            return False
        cursor.delete()
        found = bool(cursor.key())
    return True
