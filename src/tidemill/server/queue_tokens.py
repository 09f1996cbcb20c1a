"""Tokens for some queues: what they reach is in these queues, and all else is refused.

An endpoint that names a queue or a job in its path is checked here, before it is called. One that
names queues in its body checks them itself (``Endpoint.limited``). A receipt is sealed for the
token that it was given to (:mod:`.receipts`). Everything else is about the whole store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidemill.job import Envelope
from tidemill.server.backend import Backend
from tidemill.server.edge import Exchange
from tidemill.server.problems import Problem

__all__ = ["check_path", "check_put", "check_queues", "limits"]


def limits(exchange: Exchange) -> tuple[str, ...]:
    """The queues that a request may reach; empty for all."""
    return exchange.token.queues if exchange.token is not None else ()


def check_queues(exchange: Exchange, queues: Iterable[str]) -> None:
    """Refuse queues that the token is not for.

    Raises:
        Problem: it is not for one of them.
    """
    known = limits(exchange)
    for queue in queues if known else ():
        if queue not in known:
            raise _refused(exchange, f"not {queue!r}")


def check_put(exchange: Exchange, envelopes: Iterable[Envelope]) -> None:
    """Refuse jobs for other queues, and keys: a key may be that of a job in another queue.

    Raises:
        Problem: the token is not good for one of them.
    """
    if not limits(exchange):
        return
    for envelope in envelopes:
        check_queues(exchange, [envelope.queue])
        if envelope.key:
            raise _refused(exchange, "not jobs with a key, which holds in all queues")


async def check_path(
    backend: Backend, exchange: Exchange, names: Sequence[str], values: Sequence[str], known: bool
) -> None:
    """Refuse what a path names, or a path that names neither queue nor job nor receipt.

    ``known`` says that the endpoint itself checks what its body names.

    Raises:
        Problem: the token is not for it.
    """
    for name, value in zip(names, values, strict=True):
        if name == "queue":
            check_queues(exchange, [value])
        elif name == "job_id":
            record = await backend.run(backend.mill.broker.get, value)
            if record is not None:
                check_queues(exchange, [record.envelope.queue])
        known = known or name in ("queue", "job_id", "receipt")
    if not known:
        raise _refused(exchange, "not what concerns all of the store")


def _refused(exchange: Exchange, what: str) -> Problem:
    queues = ", ".join(limits(exchange))
    return Problem(
        "forbidden",
        f"the token {exchange.name!r} may reach the queues {queues} alone, {what}; use a token "
        "without --queue",
    )
