"""Opening a store: check the server's version and the store's format, remove old libraries."""

from __future__ import annotations

import contextlib
import logging

from tidemill.brokers.redis.connections import ServerConnections
from tidemill.brokers.redis.durability import evicts, read_info
from tidemill.brokers.redis.script_library import LIBRARIES, outdated
from tidemill.core.clock import clock
from tidemill.errors import BrokerUnavailable, TidemillError

log = logging.getLogger("tidemill.redis")

FORMAT = b"1"  # it grows when an older tidemill cannot read the store any more


def open_store(lines: ServerConnections) -> tuple[int, int]:
    """Return the time of the store's creation and the server's time, in microseconds."""
    where = lines.server.where
    facts = read_info(lines.ask(b"INFO"))
    version = facts.get("redis_version", "0")
    if int(version.split(".")[0]) < 7:
        raise BrokerUnavailable(f"redis at {where} is {version}; 7.0 or later is needed")
    form, born, now = lines.call("open")
    if form != FORMAT:
        raise BrokerUnavailable(
            f"the store at {where} has format {form.decode()}, "
            "which this tidemill cannot read; upgrade tidemill"
        )
    if evicts(facts):
        log.warning(
            "redis at %s may throw jobs away when its memory is full: maxmemory-policy is %s; set "
            "maxmemory-policy noeviction",
            where,
            facts["maxmemory_policy"],
        )
    if lines.server.loaded:
        lines.server.loaded = False
        with contextlib.suppress(TidemillError):  # without the permission, old libraries stay
            _remove_outdated(lines)
    if facts.get("redis_mode") == "cluster":
        lines.learn_nodes()
    return int(born), int(now)


def _remove_outdated(lines: ServerConnections) -> None:
    """Remove the libraries of other versions that were loaded more than a day ago."""
    # Only a process that had to load its own library removes others. So two versions side by side
    # do not remove each other's library again and again.
    listed = lines.ask(b"FUNCTION", b"LIST", b"LIBRARYNAME", LIBRARIES)
    for name in outdated(listed, clock.wall()):
        lines.ask(b"FUNCTION", b"DELETE", name)
