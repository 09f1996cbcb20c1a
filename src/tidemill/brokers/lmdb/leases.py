"""Leases that end without a verdict of their owner.

Such a lease ends when the time to run (ttr) of its message is over, or when its owner leaves or
dies. The jobs go back. A job that a dead owner ran gets the cause of the death as its error.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.brokers.lmdb.layout import LEASE_KEY, MICRO, tokens_of
from tidemill.brokers.lmdb.owner_table import name_of, strike_owner
from tidemill.brokers.lmdb.reply_cache import forget_last_reply
from tidemill.brokers.lmdb.settle import release_owner, settle
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.backoff import BY_POLICY
from tidemill.core.job import Outcome, Verdict
from tidemill.core.owner import Owner
from tidemill.core.scoreboard import read_scoreboard


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


def causes_of(commit: Transitions, number: int, owner: Owner) -> dict[int, str] | None:
    """Causes by token for the jobs that a dead owner ran; None when its scoreboard is missing.

    A worker's scoreboard tells which jobs ran; a consumer runs all jobs that it has taken.
    """
    if owner.kind == "consumer":
        return dict.fromkeys(tokens_of(commit.txn, commit.t, number), f"{owner.name} died")
    boards = commit.store.folder_of("boards")
    running = read_scoreboard(owner.board, owner.id, boards) if owner.board else None
    if running is None:
        return None
    return dict.fromkeys(running, f"worker {owner.name} died with its processes")
