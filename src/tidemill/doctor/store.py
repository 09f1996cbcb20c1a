"""Checks of a store and its server: durability, rights, deleted rows, policies, a move."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tidemill.brokers.contract.inspection import with_policies
from tidemill.core.words import counted
from tidemill.doctor.findings import Finding, Seen

NOT_SYNCED = "commits are not synced: jobs survive kill -9, not power loss"
"""Said of a store whose URL chooses so, and of a store in memory."""


def publishing(seen: Seen) -> Iterator[Finding]:
    """Check that a message broker accepts publishes, and measure the time of its answer."""
    before = time.monotonic()
    info = seen.broker.info()
    if "publishing" not in info:
        return
    took = (time.monotonic() - before) * 1000
    text = f"{info['server']} answered within {took:.0f} ms"
    if info["publishing"] == "open":
        yield Finding("server", "ok", text)
    else:
        advice = "puts are refused, work goes on: check memory and disk of the server"
        yield Finding("server", "fail", f"publishing is {info['publishing']}", advice)
    if info["failed"]:
        text = f"the store keeps {counted(info['failed'], 'failed job')}"
        yield Finding("failed", "warn", text, "tidemill jobs --state failed, then retry or delete")


def policies(seen: Seen) -> Iterator[Finding]:
    """Find policies of the server that can destroy accepted jobs."""
    server = with_policies(seen.broker)
    if server is None:
        return
    found = server.policies()
    for danger in found.dangers:
        yield Finding("policies", "warn", danger.text, danger.advice)
    if not found.dangers:
        yield Finding("policies", "ok", f"none is known to destroy jobs; {found.seen}")


def here(seen: Seen) -> Iterator[Finding]:
    """Report a store that moves to another store."""
    where = seen.info.get("moves_to")
    if where:
        advice = f"set TIDEMILL_URL to {where}, and start the workers there"
        yield Finding("moved", "warn", f"all of this store goes to {where}", advice)


def durable(seen: Seen) -> Iterator[Finding]:
    """Report whether accepted jobs survive the loss of power."""
    known, text = seen.info.get("durable"), seen.info.get("durability")
    if known:
        text = text or "accepted jobs survive power loss: every commit is synced"
        yield Finding("durability", "ok", text)
    elif known is not None:
        text = text or NOT_SYNCED
        advice = seen.info.get("durability_advice", "remove durability=relaxed from the url")
        yield Finding("durability", "warn", text, advice)
    else:
        yield Finding("durability", "warn", "this broker does not say how durable it is")


def granted(seen: Seen) -> Iterator[Finding]:
    """Check that the database user has all rights that calls need, also the calls after a crash."""
    lacking = seen.info.get("missing_grants")
    if lacking:
        text = f"this user lacks {'; '.join(lacking[:3])}" + (" …" if len(lacking) > 3 else "")
        advice = "run the SQL that tidemill migrate URL --grants ROLE prints, as the migrating user"
        yield Finding("grants", "fail", text, advice)
    elif lacking is not None:
        yield Finding("grants", "ok", "the user has all rights on the store")


def cleaning(seen: Seen) -> Iterator[Finding]:
    """Find old transactions that keep the server from removing deleted rows."""
    holders = seen.info.get("held_back_by")
    for text in holders or ():
        advice = (
            "end it: until then the server clears nothing away, and queues get slower "
            "(pg_terminate_backend, ROLLBACK PREPARED, pg_drop_replication_slot)"
        )
        yield Finding("cleaning", "warn", text, advice)
    if holders == []:
        yield Finding("cleaning", "ok", "no old transaction keeps deleted rows")
