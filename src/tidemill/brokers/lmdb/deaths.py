"""An owner that left or died: what it held goes back, and what it ran at that time."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.board import read_board
from tidemill.brokers.lmdb.moves import Moves
from tidemill.brokers.lmdb.roster import strike_owner
from tidemill.brokers.lmdb.said import forget_said
from tidemill.brokers.lmdb.verdicts import leases_of, release_owner
from tidemill.job import RELAY, Owner

__all__ = ["causes_of", "strike"]


def strike(moves: Moves, number: int, owner: Owner, causes: Mapping[int, str] | None) -> int:
    """Take an owner off the list, with its leases and commands; how many leases it had."""
    if causes is None and owner.kind == RELAY:
        causes = {}
    held = release_owner(moves, number, owner.name, causes)
    strike_owner(moves, number)
    forget_said(moves, number)
    return held


def causes_of(moves: Moves, number: int, owner: Owner) -> dict[int, str] | None:
    """What a dead owner ran: a worker's board says; a consumer runs all it has taken."""
    if owner.kind == "consumer":
        return dict.fromkeys(leases_of(moves, number), f"{owner.name} died")
    boards = moves.store.folder_of("boards")
    running = read_board(owner.board, owner.id, boards) if owner.board else None
    if running is None:
        return None
    return dict.fromkeys(running, f"worker {owner.name} died with its processes")
