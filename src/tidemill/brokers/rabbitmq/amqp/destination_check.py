"""Destination checks: the first message to a place goes over a separate channel.

When the first message of a channel goes to a silent queue, the channel and all its later messages
wait for half a minute. So the first message to a place goes over its own channel. After its
confirm, later messages to that place go over the main channel.
"""

from __future__ import annotations

from collections import deque

import pika

from tidemill.brokers.rabbitmq.amqp.confirm_channel import ConfirmChannel, ConfirmListener
from tidemill.brokers.rabbitmq.amqp.publish_windows import PublishWindow

_MOST = 64
"""The most places that are checked at a time."""


class DestinationChecks:
    """The destination checks of one connection."""

    def __init__(self) -> None:
        self.channels: dict[str, ConfirmChannel] = {}  # by place
        self.proven: set[str] = set()
        self._waiting: dict[str, list[PublishWindow]] = {}  # windows that wait, by place
        self._deferred: deque[PublishWindow] = deque()  # windows that wait until fewer checks run

    def enter(
        self, window: PublishWindow, connection: pika.SelectConnection, listener: ConfirmListener
    ) -> None:
        """Check the queue of a window; the window waits for the result."""
        window.checking = True
        if window.target in self.channels:
            self._waiting[window.target].append(window)
        elif len(self.channels) < _MOST:
            self._waiting[window.target] = [window]
            self.channels[window.target] = ConfirmChannel(connection, listener, window.target)
        else:
            self._deferred.append(window)

    def first(self, channel: ConfirmChannel) -> PublishWindow | None:
        """A window of the checked queue that has a message to send, or None."""
        return next((window for window in self._waiting[channel.destination] if window.todo), None)

    def end(self, channel: ConfirmChannel) -> list[PublishWindow]:
        """End a check. Return the windows that go on: all that waited, and a deferred window."""
        channel.close()
        self.channels.pop(channel.destination, None)
        windows = self._waiting.pop(channel.destination, [])
        if self._deferred:
            windows.append(self._deferred.popleft())
        for window in windows:
            window.checking = False
        return windows

    def forget(self) -> None:
        """Forget all checks and results: the connection is gone."""
        for kept in (self.channels, self.proven, self._waiting, self._deferred):
            kept.clear()
