"""The end of an owner that left or died: its leases go back, with causes for the jobs it ran."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.brokers.lmdb.owner_table import strike_owner
from tidemill.brokers.lmdb.reply_cache import forget_said
from tidemill.brokers.lmdb.settle import leases_of, release_owner
from tidemill.brokers.lmdb.transitions import Transitions
from tidemill.core.job import RELAY, Owner
from tidemill.core.scoreboard import read_scoreboard

__all__ = ["causes_of", "strike"]


def strike(commit: Transitions, number: int, owner: Owner, causes: Mapping[int, str] | None) -> int:
    """Take an owner off the list, with its leases and commands; return the number of leases."""
    if causes is None and owner.kind == RELAY:
        causes = {}
    held = release_owner(commit, number, owner.name, causes)
    strike_owner(commit, number)
    forget_said(commit, number)
    return held


def causes_of(commit: Transitions, number: int, owner: Owner) -> dict[int, str] | None:
    """Causes by token for the jobs that a dead owner ran; None when nobody can tell.

    A worker's scoreboard tells which jobs ran; a consumer runs all jobs that it has taken.
    """
    if owner.kind == "consumer":
        return dict.fromkeys(leases_of(commit, number), f"{owner.name} died")
    boards = commit.store.folder_of("boards")
    running = read_scoreboard(owner.board, owner.id, boards) if owner.board else None
    if running is None:
        return None
    return dict.fromkeys(running, f"worker {owner.name} died with its processes")
