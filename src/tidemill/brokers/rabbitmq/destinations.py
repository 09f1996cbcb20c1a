"""Prepare a place before messages go there: make its queue, tell workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.brokers.rabbitmq.amqp.publish_windows import Outgoing, PublishWindow
from tidemill.brokers.rabbitmq.amqp.topology import Answer, Declarer
from tidemill.brokers.rabbitmq.layout import Place


class Destinations:
    """The places that one connection publishes to. All methods run in the connection thread.

    ``notice`` makes the message that tells workers of a listed place (``Place.listed``). ``send``
    sends such messages and calls back when the server has stored them.
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
        """Begin on a new connection, which may lead to another server."""
        self._noticed.clear()

    def forget_all(self) -> None:
        """Forget everything that was declared: somebody may have deleted queues."""
        self._declarer.forget_all()
        self._noticed.clear()

    def has(self, window: PublishWindow) -> bool:
        """Whether everything that a window needs was made."""
        declarer, home = self._declarer, window.home
        told = not home.listed or home.name in self._noticed
        return told and declarer.knows(home)

    def make(self, window: PublishWindow, then: Answer) -> None:
        """Make the queue that a window needs."""

        def declared(why: str) -> None:
            # A listed place: workers serve the queue only after a notice.
            if window.home.listed and not why:
                self._send([self._notice(window.home)], noticed)
            else:
                then(why)

        def noticed() -> None:
            self._noticed.add(window.home.name)
            then("")

        self._declarer.declare([window.home], declared)
