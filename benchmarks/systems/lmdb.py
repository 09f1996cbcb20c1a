"""The floor under tidemill: bare LMDB, one put of a small record in one durable commit."""

import itertools

import lmdb

RECORD = bytes(100)
_keys = itertools.count()
_env = None


def setup(tmp):
    global _env
    _env = lmdb.open(f"{tmp}/bare", map_size=1 << 32, readahead=False)


def enqueue_one(stamp=0.0):
    with _env.begin(write=True) as txn:
        txn.put(next(_keys).to_bytes(8, "big"), RECORD, append=True)


def stop():
    _env.close()
