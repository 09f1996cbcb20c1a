"""What has to be there before something goes to a place: queues, ways, and that workers know it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.brokers.rabbitmq.declaring import Answer, Declarer
from tidemill.brokers.rabbitmq.lanes import Lane, Outgoing
from tidemill.brokers.rabbitmq.names import Place

__all__ = ["Readiness"]


class Readiness:
    """Of the places that one line publishes to. All of it runs in the line's thread.

    ``notice`` makes the message that tells workers of a listed place. ``send`` sends such messages,
    and tells when the server has them.
    """

    def __init__(
        self,
        declarer: Declarer,
        notice: Callable[[Place], Outgoing],
        send: Callable[[Sequence[Outgoing], Callable[[], None]], None],
    ) -> None:
        self._declarer = declarer
        self._notice = notice
        self._send = send
        self._noticed: set[str] = set()

    def begin_anew(self) -> None:
        """There is a new connection, which may lead to another server."""
        self._noticed.clear()

    def forget_all(self) -> None:
        """Somebody deletes queues: nothing is taken for granted any more."""
        self._declarer.forget_all()
        self._noticed.clear()

    def has(self, lane: Lane) -> bool:
        """Whether all is there that a lane needs."""
        declarer, home = self._declarer, lane.home
        told = not home.listed or home.name in self._noticed
        ways = not lane.digits or declarer.knows_waits(lane.digits)
        return told and ways and declarer.knows(home)

    def make(self, lane: Lane, then: Answer) -> None:
        """Make what a lane needs."""

        def declared(why: str) -> None:
            if lane.home.listed and not why:  # who hears of a queue may use it at once
                self._send([self._notice(lane.home)], noticed)
            elif why or not lane.digits:
                then(why)
            else:
                self._declarer.declare_waits(lane.digits, then)

        def noticed() -> None:
            self._noticed.add(lane.home.name)
            then("")

        self._declarer.declare([lane.home], declared)
