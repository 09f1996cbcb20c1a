"""The calls for schedules; ``sql/55_schedules.sql`` is the server's side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from tidemill.brokers.contract.exchange import Reply, Step
from tidemill.brokers.contract.schedules import CLAIM, Change, Changed, Schedule
from tidemill.brokers.postgres.connections import ServerConnection
from tidemill.brokers.postgres.encoding import blobs, floats, ints, texts
from tidemill.brokers.postgres.put import pack_jobs
from tidemill.brokers.postgres.statements import Session
from tidemill.brokers.postgres.timed_connection import Connection
from tidemill.errors import BrokerUnavailable, TidemillError

_LOG = logging.getLogger("tidemill.postgres")
_FIELDS = "name, version, due, body"


def get(session: Session, names: Sequence[str]) -> list[Schedule | None]:
    table = f'"{session.address.schema}".schedule'
    text = f"SELECT {_FIELDS} FROM {table} WHERE name = ANY (%b::text[])"
    rows = session.query(text, [texts(names)])
    found = {row[0]: Schedule(*row) for row in rows}
    return [found.get(name) for name in names]


def page(session: Session, after: str = "", limit: int = 100) -> list[Schedule]:
    table = f'"{session.address.schema}".schedule'
    text = f"SELECT {_FIELDS} FROM {table} WHERE name > %s ORDER BY name LIMIT %s"
    return [Schedule(*row) for row in session.query(text, [after, limit])]


def hand_out(session: Session, step: Step, reply: Reply, firing: float) -> None:
    """Take the schedules that are due; ``firing`` is the seconds until the next is due."""
    if firing <= 0:
        try:
            [(*columns, wait)] = session.rows("hand_out", [step.fires], "int")
        except TidemillError as error:
            # The step is done; these schedules are handed out again later.
            if not isinstance(error, BrokerUnavailable):
                _LOG.warning("schedules are not handed out: %s", error)
            columns, wait = [()] * 4, CLAIM
        reply.schedules = [Schedule(*row) for row in zip(*(c or () for c in columns), strict=True)]
        firing = float("inf") if wait is None else wait
    reply.next_due = min(reply.next_due, max(0.0, firing))


def change(session: Session, changes: Sequence[Change]) -> list[Changed]:
    """Change the records that still have the expected version, and put their jobs."""
    if not changes:
        return []
    jobs = [job for change in changes for job in change.jobs]
    queues = session.queues
    arguments = [
        texts([change.name for change in changes]),
        ints([change.expect for change in changes]),
        floats([change.due for change in changes]),
        blobs([change.body for change in changes]),
        ints([change.gone for change in changes]),
        floats([change.instead[0] for change in changes]),
        blobs([change.instead[1] for change in changes]),
        ints([n for n, change in enumerate(changes, 1) for _ in change.jobs]),
        *pack_jobs(session, jobs),
        session.prefs(),
    ]
    serials: dict[str, int] = {}

    def work(connection: ServerConnection, conn: Connection) -> Any:
        session.check_numbers(queues)
        # If the serial exists, the reply was lost: repeat the call.
        if connection.id not in serials:
            connection.serial += 1
            serials[connection.id] = connection.serial
        values = [connection.id, serials[connection.id], *arguments]
        row = conn.execute(session.statements.change_schedules, values, binary=True).fetchone()
        assert row is not None
        return row[0]

    answer = session.connections.run(work, patience=session.address.patience)
    return [Changed(done, version, tuple(left_out)) for done, version, left_out in answer]
