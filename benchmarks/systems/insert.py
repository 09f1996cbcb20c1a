"""The floor under a put on PostgreSQL: one INSERT and its commit, by the same driver."""

import itertools
import os

import psycopg

_ids = itertools.count()


def setup(tmp):
    global connection
    connection = psycopg.connect(os.environ["BENCH_POSTGRES_URL"], autocommit=True)
    connection.execute("CREATE TABLE job (id text PRIMARY KEY, body bytea)")


def enqueue_one(stamp=0.0):
    connection.execute("INSERT INTO job VALUES (%s, %s)", [str(next(_ids)), b"x" * 100])


def stop():
    connection.close()
