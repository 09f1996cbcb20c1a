"""Leases that end without a verdict of their owner.

Such a lease ends when the time to run (ttr) of its message is over, or when its owner leaves or
dies. The jobs go back. A job that a dead owner ran gets the cause of the death as its error.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.brokers.lmdb.layout import LEASE_KEY, MICRO
from tidemill.brokers.lmdb.owner_table import name_of, strike_owner
from tidemill.brokers.lmdb.reply_cache import forget_last_reply
from tidemill.brokers.lmdb.settle import release_owner, settle
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.backoff import BY_POLICY
from tidemill.core.job import Outcome, Verdict
from tidemill.core.owner import Owner


def expire_lease(commit: Transitions, lease_key: bytes, token: int) -> None:
    """End a lease whose time to run has passed: the attempt failed."""
    owner = LEASE_KEY.unpack(lease_key)[0]
    ended = commit.wall / MICRO
    error = "ttr passed without an ack"
    verdict = Verdict(token, Outcome.RETRY, delay=BY_POLICY, error=error, ended=ended)
    settle(commit, owner, name_of(commit.txn, commit.t, owner), verdict)


def strike(commit: Transitions, number: int, owner: Owner, causes: Mapping[int, str] | None) -> int:
    """Remove an owner from the list, with its leases and commands; return the number of leases."""
    held = release_owner(commit, number, owner.name, causes)
    strike_owner(commit, number)
    forget_last_reply(commit, number)
    return held
