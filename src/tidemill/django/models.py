"""The tables of the broker ``django://``.

The broker reads and writes these tables by its own SQL. The models exist for migrations, for
``dumpdata``, and for people who read the tables. Do not write through the models: use the broker.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from django.db import models

_NAME = 255
_LONG = 600


class Store(models.Model):
    """Facts of the whole store: one row.

    Attributes:
        departs: 1 when a move of all jobs to another store has begun.
        facts: the other facts, encoded.
    """

    id = models.IntegerField(primary_key=True)
    departs = models.SmallIntegerField(default=0)
    facts = models.BinaryField(default=b"")

    class Meta:
        db_table = "tidemill_store"


class Job(models.Model):
    """A job: the columns that queries use, the envelope, and all other facts encoded.

    Attributes:
        seq: the number of the job in the order of acceptance, which orders jobs of one priority.
        kind: 0 for tasks, 1 for messages, 2 for tasks that were lost with their worker; 4 more for
            a job under a limit.
        state: the index of the state in ``tidemill.core.job.State``.
        alarm: the next time at which the broker must act on an unfinished job: epoch seconds.
        prune: the time at which a finished job is deleted.
        token: the number of the lease of a running job; 0 for none.
        share: the limit and key of a job under a limit; else empty.
        linked: for a finished job: 1 for a job of a flow, 2 for a success without a result, 3 for a
            purged job.
        fresh: 1 until the job is counted in the total of its queue.
        large: the result and the log, which lists do not read.
    """

    seq = models.BigAutoField(primary_key=True)
    id = models.CharField(max_length=_NAME, unique=True)
    queue = models.CharField(max_length=_NAME)
    kind = models.SmallIntegerField(default=0)
    state = models.SmallIntegerField()
    rank = models.BigIntegerField()
    due = models.FloatField(default=0)
    expires = models.FloatField(default=0)
    alarm = models.FloatField(null=True)
    prune = models.FloatField(null=True)
    token = models.BigIntegerField(default=0)
    holder = models.CharField(max_length=_NAME, default="")
    task = models.CharField(max_length=_NAME, default="")
    key = models.CharField(max_length=_NAME, default="")
    share = models.CharField(max_length=_LONG, default="")
    linked = models.SmallIntegerField(default=0)
    fresh = models.SmallIntegerField(default=0)
    finished = models.FloatField(default=0)
    envelope = models.BinaryField(default=b"")
    facts = models.BinaryField(default=b"")
    large = models.BinaryField(default=b"")

    class Meta:
        db_table = "tidemill_job"


class Key(models.Model):
    """A job with a key: a holder (place 1), the holder's successor (2), a succeeded holder (3)."""

    id = models.BigAutoField(primary_key=True)
    key = models.CharField(max_length=_NAME)
    place = models.SmallIntegerField()
    job = models.CharField(max_length=_NAME)
    until = models.FloatField(default=0)

    class Meta:
        db_table = "tidemill_key"
        unique_together = [("key", "place")]


class Queue(models.Model):
    """The settings and totals of a queue."""

    name = models.CharField(max_length=_NAME, primary_key=True)
    paused = models.SmallIntegerField(default=0)
    max_size = models.BigIntegerField(default=0)
    accepted = models.BigIntegerField(default=0)
    succeeded = models.BigIntegerField(default=0)
    failed = models.BigIntegerField(default=0)
    cancelled = models.BigIntegerField(default=0)
    expired = models.BigIntegerField(default=0)
    retried = models.BigIntegerField(default=0)
    purged = models.BigIntegerField(default=0)

    class Meta:
        db_table = "tidemill_queue"


class Owner(models.Model):
    """A worker or consumer, the end of its lease, and the store's last reply to it."""

    id = models.CharField(max_length=_NAME, primary_key=True)
    until = models.FloatField()
    serial = models.BigIntegerField(default=0)
    facts = models.BinaryField()
    commands = models.BinaryField(default=b"")
    reply = models.BinaryField(default=b"")

    class Meta:
        db_table = "tidemill_owner"
        verbose_name = "worker"


class Schedule(models.Model):
    """A schedule or a task's declaration. ``claimed``: the time at which a worker's claim ends."""

    name = models.CharField(max_length=_NAME, primary_key=True)
    version = models.BigIntegerField()
    due = models.FloatField(default=0)
    claimed = models.FloatField(default=0)
    body = models.BinaryField(default=b"")

    class Meta:
        db_table = "tidemill_schedule"


class Limit(models.Model):
    """The settings of a limit. ``name`` begins with ``q`` for a queue's limit, else with ``n``."""

    name = models.CharField(max_length=_NAME, primary_key=True)
    facts = models.BinaryField()

    class Meta:
        db_table = "tidemill_limit"


class Partition(models.Model):
    """One key of one limit."""

    share = models.CharField(max_length=_LONG, primary_key=True)
    running = models.BigIntegerField(default=0)
    turn = models.BigIntegerField(default=0)
    limiter = models.BinaryField(default=b"")

    class Meta:
        db_table = "tidemill_partition"


class HistoryRow(models.Model):
    """Numbers under one name in one period."""

    id = models.BigAutoField(primary_key=True)
    kind = models.CharField(max_length=40)
    span = models.IntegerField()
    at = models.BigIntegerField()
    name = models.CharField(max_length=_LONG)
    counts = models.BinaryField(default=b"")
    sample = models.BinaryField(default=b"")

    class Meta:
        db_table = "tidemill_history"
        unique_together = [("kind", "span", "at", "name")]


class Number(models.Model):
    """The table from which databases without sequences draw numbers."""

    n = models.BigAutoField(primary_key=True)

    class Meta:
        db_table = "tidemill_number"
