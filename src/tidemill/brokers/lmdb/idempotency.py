"""Puts that may be repeated: the store keeps answers to puts with a nonce for at least ten minutes.

The key of an answer is its time span and its nonce. The answers of an old span are deleted
together, from the start of the table. Nonces that grow with time, like ids, are added at the end of
the table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import msgspec

from tidemill.brokers.contract.exchange import check_nonce
from tidemill.brokers.lmdb.layout import MICRO
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.envelope import Envelope
from tidemill.core.job import Placed, Put

_KEY = struct.Struct(">cI")  # the nonce follows
_NONCES = b"n"
_SPAN = 300 * MICRO
_SPANS = 2  # the number of past time spans that are kept
_SWEEP_MOST = 20_000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Put]).decode


def put_once(
    nonce: str, jobs: Sequence[Envelope], accept: Callable[[Transitions], list[Put]]
) -> Callable[[Transitions], list[Put]]:
    """Put, or return the answer to an earlier put with this nonce."""
    check_nonce(nonce)
    name = nonce.encode()

    def once(commit: Transitions) -> list[Put]:
        span = commit.now // _SPAN
        for earlier in range(_SPANS + 1):
            data = commit.txn.get(_KEY.pack(_NONCES, span - earlier) + name, db=commit.t.said)
            if data is not None:
                return _decode(data) if data else [Put(job.id, Placed.CREATED) for job in jobs]
        puts = accept(commit)
        # An empty value means that all jobs of the put were created.
        plain = all(put.placed is Placed.CREATED for put in puts)
        commit.txn.put(
            _KEY.pack(_NONCES, span) + name, b"" if plain else _encode(puts), db=commit.t.said
        )
        return puts

    return once


def sweep_nonces(commit: Transitions) -> bool:
    """Forget old answers, as many as one commit should; True when more are left."""
    first = _KEY.pack(_NONCES, max(0, commit.now // _SPAN - _SPANS))
    cursor = commit.txn.cursor(commit.t.said)
    found = cursor.set_range(_NONCES)
    for _ in range(_SWEEP_MOST):
        if not found or not _NONCES < cursor.key() < first:
            return False
        cursor.delete()
        found = bool(cursor.key())
    return True
