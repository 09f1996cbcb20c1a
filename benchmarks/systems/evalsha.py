"""The floor under tidemill on Redis: round trips of a script that does nothing, by redis-py."""

import os

import redis

_client = redis.Redis.from_url(os.environ["BENCH_REDIS_URL"])
_sha = _client.script_load("return 1")


def setup(tmp):
    """Nothing to prepare."""


def enqueue_one(stamp=0.0):
    _client.evalsha(_sha, 1, "key")


def stop():
    _client.close()
