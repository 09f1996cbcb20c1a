"""Bindings of queues to topics, and publishing; ``sql/22_topics.sql`` is the server's side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from tidemill.brokers.contract.exchange import check_nonce
from tidemill.brokers.contract.topics import Binding, Bindings
from tidemill.brokers.postgres.caller_transaction import open_transaction, run_inside
from tidemill.brokers.postgres.errors import conflict, translated
from tidemill.brokers.postgres.put import call, call_inside, puts_of
from tidemill.brokers.postgres.statements import Session
from tidemill.core.envelope import Envelope
from tidemill.core.job import Put

_STALE = "stale"
"""The answer when the bindings have another version."""


def bind(session: Session, queue: str, pattern: str) -> bool:
    """Bind a queue to a pattern; False when the queue is bound already."""
    return bool(session.once("bind_queue", [queue, pattern], "text, text", plain=True))


def unbind(session: Session, queue: str, pattern: str) -> bool:
    """Delete a binding; False when there is no such binding."""
    return bool(session.once("unbind_queue", [queue, pattern], "text, text", plain=True))


def bindings(session: Session, txn: Any = None) -> Bindings:
    """All bindings, read at one moment."""
    if txn is None:
        answer = session.call("all_bindings", [], "", plain=True)
    else:
        conn = open_transaction(session, txn)
        try:
            answer = run_inside(conn, session.statements.bindings, [])
        except psycopg.Error as error:
            raise conflict(error) or translated(error, session.address.where) from error
    version, pairs = answer
    return Bindings(version, tuple(sorted(Binding(*pair) for pair in pairs)))


def publish(
    session: Session, jobs: Sequence[Envelope], version: str, txn: Any = None, nonce: str = ""
) -> list[Put] | None:
    """Accept jobs if the bindings have this version; None if they have another version."""
    check_nonce(nonce)
    statements = session.statements
    if txn is not None:
        answer = call_inside(session, statements.publish_inside, jobs, (version,), txn)
    elif jobs:
        answer = call(session, statements.publish, jobs, (version,), nonce)
    else:
        has = session.call("bindings_have", [version], "text", plain=True)
        answer = None if has else _STALE
    return None if answer == _STALE else puts_of(jobs, answer)
