"""Which process gets which lease: free slots first, evenly, then by how much each would hold."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.job import Lease
from tidemill.worker.hand import Hand

__all__ = ["deal_out"]


def deal_out(leases: list[Lease], hands: list[Hand]) -> None:
    """Give the leases to processes that have room."""
    if len(hands) == 1:
        hands[0].give(leases)
        return
    dealt: dict[int, list[Lease]] = {id(hand): [] for hand in hands}
    for hand, lease in zip(_seats(hands, dealt), leases, strict=False):
        dealt[id(hand)].append(lease)
    for hand in hands:
        if dealt[id(hand)]:
            hand.give(dealt[id(hand)])


def _seats(hands: list[Hand], dealt: dict[int, list[Lease]]) -> Iterator[Hand]:
    """The processes for the next leases, without end."""
    for limits in ([hand.slots for hand in hands], [hand.depth for hand in hands]):
        open_hands = list(zip(hands, limits, strict=True))
        while open_hands:
            for hand, limit in list(open_hands):
                if len(hand.held) + len(dealt[id(hand)]) < limit:
                    yield hand
                else:
                    open_hands.remove((hand, limit))
    while True:
        yield from hands
