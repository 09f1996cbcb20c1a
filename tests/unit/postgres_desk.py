"""For the tests of the PostgreSQL broker: jobs, owners, processes, a user's connection."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psycopg
import pytest
from harness import eventually
from servers import Postgres

from tidemill.brokers.contract.broker import Broker
from tidemill.brokers.contract.exchange import Step, Want
from tidemill.brokers.contract.inspection import Filter
from tidemill.core.clock import new_id
from tidemill.core.envelope import Envelope
from tidemill.core.job import Lease

PRELUDE = """
import sys, os, signal, time
from tidemill.brokers.contract.exchange import *
from tidemill.brokers.contract.features import *
from tidemill.brokers.contract.inspection import *
from tidemill.brokers.registry import open_broker
from tidemill.core.job import *
from tidemill.core.clock import new_id
broker = open_broker(sys.argv[1])
def say(text): print(text, flush=True)
def job(): return Envelope(id=new_id(), task="t")
def take(owner, count=1, **kinds):
    return broker.exchange(Step(owner, want=Want(count, **kinds))).leases
"""


def job(**fields: Any) -> Envelope:
    return Envelope(**{"id": new_id(), "task": "t", **fields})


def ids(broker: Broker) -> set[str]:
    return {r.envelope.id for r in broker.find(Filter(), 10_000).records}


def take(broker: Broker, owner: str, count: int = 1) -> list[Lease]:
    return broker.exchange(Step(owner, want=Want(count))).leases


def connect(url: str, **options: Any) -> psycopg.Connection:
    """A connection as a user makes it."""
    return psycopg.connect(url.partition("?")[0], **options)


def until_blocked(looker: psycopg.Connection, holder: psycopg.Connection) -> None:
    """Until somebody waits for what another connection holds; others use the same server."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid))"

    def is_blocked() -> bool:
        row = looker.execute(query, [holder.info.backend_pid]).fetchone()
        return row is not None and row[0] > 0

    eventually(is_blocked, "somebody waits", pause=0.001)


def deadlocks(server: Postgres) -> str:
    """What the server's log says of any, also of those that were broken and made good again."""
    log = server.log.read_text(errors="replace")
    at = log.find("deadlock detected")
    return "" if at < 0 else log[at : at + 3000]


def start(
    url: str, script: str, *arguments: str, temp: Path | None = None
) -> subprocess.Popen[str]:
    """A process of its own with a broker on the store; ``temp`` is its temporary folder."""
    code = PRELUDE + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", code, url, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        env={**os.environ, **({"TMPDIR": str(temp)} if temp else {})},
    )


def lose_replies(monkeypatch: pytest.MonkeyPatch, word: bytes) -> list[bytes]:
    """The next call of that name is done, and its reply lost with the connection."""
    execute = psycopg.Cursor.execute
    lost: list[bytes] = []

    def lose(self: psycopg.Cursor, query: bytes, *args: object, **options: object) -> object:
        cursor = execute(self, query, *args, **options)  # type: ignore[arg-type]
        if isinstance(query, bytes) and word in query and not lost:
            lost.append(query)
            self.connection.close()
            raise psycopg.OperationalError("the reply is lost")
        return cursor

    monkeypatch.setattr(psycopg.Cursor, "execute", lose)
    return lost
