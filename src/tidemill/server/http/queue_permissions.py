"""Tokens for some queues: they may use jobs of these queues, and nothing else.

Queues and jobs in the path of an endpoint are checked here, before the call; an endpoint with
queues in its body checks them itself (``Endpoint.checks_queues``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidemill.app import Tidemill
from tidemill.client.compositions import MEMBER_COUNT, lies_in
from tidemill.core.envelope import Envelope
from tidemill.core.job import GROUP
from tidemill.server.http.backend import Backend
from tidemill.server.http.exchange import Exchange
from tidemill.server.http.problems import Problem
from tidemill.server.http.schemas.jobs import MessageOptions


def allowed_queues(exchange: Exchange) -> tuple[str, ...]:
    """The queues that a request may use; empty for all queues."""
    return exchange.token.queues if exchange.token is not None else ()


def check_queues(exchange: Exchange, queues: Iterable[str]) -> None:
    known = allowed_queues(exchange)
    for queue in queues if known else ():
        if queue not in known:
            raise _refused(exchange, f"not {queue!r}")


def check_put(
    exchange: Exchange, envelopes: Iterable[Envelope], given: Iterable[MessageOptions]
) -> None:
    """Check that the token may put these jobs: in its queues, without keys and limits."""
    if not allowed_queues(exchange):
        return
    for envelope in envelopes:
        check_queues(exchange, [envelope.queue])
        if envelope.key:  # a job of another queue may have it
            raise _refused(exchange, "not put jobs with a key, since a key is unique in all queues")
    if any(options.limit is not None for options in given):  # it changes the limit for all queues
        raise _refused(exchange, "not put jobs with a limit, since a limit holds in all queues")


async def check_path(
    backend: Backend, exchange: Exchange, names: Sequence[str], values: Sequence[str], known: bool
) -> None:
    """Check the queue or job in a path. ``known``: the endpoint checks its body."""
    for name, value in zip(names, values, strict=True):
        if name == "queue":
            check_queues(exchange, [value])
        elif name == "job_id":
            await backend.run(_check_job, backend.mill, exchange, value)
        known = known or name in ("queue", "job_id", "receipt")
    if not known:
        raise _refused(exchange, "not a call that concerns the whole store")


def _check_job(mill: Tidemill, exchange: Exchange, job_id: str) -> None:
    """Check that the token may use a job. The record of a group lies in no queue of users."""
    record = mill.broker.get(job_id)
    if record is None:
        return
    if record.envelope.task != GROUP:
        check_queues(exchange, [record.envelope.queue])
    elif not lies_in(
        mill.runtime, job_id.removesuffix(f".{MEMBER_COUNT}"), allowed_queues(exchange)
    ):
        raise _refused(exchange, f"and group {job_id} has jobs in other queues")


def _refused(exchange: Exchange, what: str) -> Problem:
    queues = ", ".join(allowed_queues(exchange))
    return Problem(
        "forbidden",
        f"the token {exchange.name!r} may only use the queues {queues}, {what}; use a token "
        "without --queue",
    )
