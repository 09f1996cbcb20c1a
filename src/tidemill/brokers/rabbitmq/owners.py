"""The objects that the owners of one process share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tidemill.brokers.rabbitmq.amqp.connection_thread import ConnectionThread
from tidemill.brokers.rabbitmq.amqp.publish_channel import Outgoing
from tidemill.brokers.rabbitmq.amqp.topology import Declarer
from tidemill.brokers.rabbitmq.layout import Names
from tidemill.brokers.rabbitmq.message import Writer
from tidemill.brokers.rabbitmq.put import Publisher


class OwnerContext(msgspec.Struct, frozen=True):
    """The objects that the owners of a process share."""

    thread: ConnectionThread
    side: ConnectionThread
    declarer: Declarer
    publisher: Publisher
    names: Names
    writer: Writer
    next_token: Callable[[], int]
    announce: Callable[[Sequence[str]], Sequence[Outgoing]]
