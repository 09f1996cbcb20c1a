"""Looking whether a server can be used: its version, the store there, old functions of ours."""

from __future__ import annotations

import contextlib

from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.durability import read_info
from tidemill.brokers.redis.script_library import LIBRARIES, outdated
from tidemill.core.clock import wall_time
from tidemill.core.errors import BrokerUnavailable, TidemillError

__all__ = ["open_store"]

FORMAT = b"2"
"""Raised when what is written can no longer be read by an older tidemill."""


def open_store(lines: ServerConnections) -> tuple[int, int]:
    """When the store was made, and the server's time: microseconds.

    Raises:
        BrokerUnavailable: the server, or the store on it, cannot be used.
    """
    where = lines.server.where
    facts = read_info(lines.ask(b"INFO", b"server"))
    version = facts.get("redis_version", "0")
    if int(version.split(".")[0]) < 7:
        raise BrokerUnavailable(f"redis at {where} is {version}; 7.0 or later is needed")
    form, born, now = lines.call("open")
    if form != FORMAT:
        raise BrokerUnavailable(
            f"the store at {where} has format {form.decode()}, "
            "which this tidemill cannot read; upgrade tidemill"
        )
    if lines.server.loaded:
        lines.server.loaded = False
        with contextlib.suppress(TidemillError):  # a user may lack the right; they only take room
            _remove_outdated(lines)
    if facts.get("redis_mode") == "cluster":
        lines.learn_nodes()
    return int(born), int(now)


def _remove_outdated(lines: ServerConnections) -> None:
    """Remove the libraries of earlier versions, but for those that were loaded a day ago or less.

    Only a process that has found no library of its version when it opened the store does so: two
    versions that run side by side never remove each other's again and again.
    """
    listed = lines.ask(b"FUNCTION", b"LIST", b"LIBRARYNAME", LIBRARIES)
    for name in outdated(listed, wall_time()):
        lines.ask(b"FUNCTION", b"DELETE", name)
