"""Errors of the server and the driver, translated into sentences that name a remedy."""

from __future__ import annotations

from redis import exceptions as redis_errors

from tidemill.brokers.contract.dependencies import not_waiting
from tidemill.errors import BrokerUnavailable, DuplicateJob, QueueFull, StoreFull, TidemillError


class Away(BrokerUnavailable):
    """The server is away, perhaps only for a moment: a call with ``patience`` tries again."""


_PASSING = {
    "LOADING": "is loading its data",
    "BUSY": "is busy with another client's script",
    "CLUSTERDOWN": "belongs to a cluster that is down; see CLUSTER INFO",
    "MASTERDOWN": "is a replica whose master is down",
    "TRYAGAIN": "is handing its slot to another node",
    "ASK": "is handing its slot to another node",
    "MOVED": "has handed its slot to another node",
    "NOREPLICAS": "has too few replicas to accept writes (min-replicas-to-write)",
    "READONLY": "is a read-only replica; name its master in the url, or use redis+sentinel://",
    "UNKILLABLE": "is busy with another client's script",
}
_LASTING = {
    "NOAUTH": "wants a password; write redis://user:password@host",
    "WRONGPASS": "refuses the user or the password in the url",
    "NOPERM": "does not let this user run what a broker runs; grant it +@all on its keys, &* too",
    "DB INDEX": "does not have the database number in the url",
    "INVALID PASSWORD": "refuses the password in the url",
    "AUTH": "wants no password, or refuses the one in the url",
    "UNKNOWN COMMAND": "lacks a command that is needed; Redis 7.0 or later, or Valkey, has all",
}
_FULL = {
    "OOM": "is out of memory (maxmemory): raise it, or let the workers finish what is there",
    "MISCONF": "cannot write to its disk and refuses writes; see its log",
}


def is_broken(error: Exception) -> bool:
    """True when the connection is broken, so that nobody knows whether the call ran."""
    return isinstance(error, redis_errors.ConnectionError | redis_errors.TimeoutError | OSError)


def code_of(error: Exception) -> str:
    """The first words of a server's error, without ``ERR``, which redis-py does not always cut."""
    return str(error).upper().removeprefix("ERR ")


def translate(error: Exception, where: str) -> TidemillError:
    """The error to raise in place of the driver's error."""
    code = code_of(error)
    kinds: tuple[tuple[type[TidemillError], dict[str, str]], ...] = (
        (StoreFull, _FULL),
        (Away, _PASSING),
        (BrokerUnavailable, _LASTING),
    )
    for kind, sentences in kinds:
        for start, sentence in sentences.items():
            if code.startswith(start):
                return kind(f"redis at {where} {sentence}")
    if isinstance(error, redis_errors.AuthenticationError):
        return BrokerUnavailable(f"redis at {where} refuses the user or the password in the url")
    if is_broken(error):
        return Away(
            f"cannot reach redis at {where}: {_first_line(error)}; start it, or correct the url"
        )
    return TidemillError(f"redis at {where} refused a step: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__).rstrip(".")


def refusal(what: bytes, *facts: str) -> TidemillError:
    """The error for a put that the store refused, by the function's answer."""
    if what == b"id":
        return DuplicateJob(f"a job with the id {facts[0]!r} exists already", facts[0])
    if what == b"waits":
        return not_waiting(facts[0])
    if what == b"key":
        return DuplicateJob.of_key(facts[1], facts[0])
    return QueueFull(f"queue {facts[0]!r} holds max_size={facts[1]} jobs already")
