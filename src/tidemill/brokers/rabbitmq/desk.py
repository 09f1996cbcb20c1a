"""What the owners of one process share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from tidemill.brokers.rabbitmq.declaring import Declarer
from tidemill.brokers.rabbitmq.line import Line
from tidemill.brokers.rabbitmq.message import Writer
from tidemill.brokers.rabbitmq.names import Names
from tidemill.brokers.rabbitmq.publisher import Outgoing, Publisher

__all__ = ["Desk"]


class Desk(msgspec.Struct, frozen=True):
    """What the owners of a process share."""

    line: Line
    declarer: Declarer
    publisher: Publisher
    names: Names
    writer: Writer
    next_token: Callable[[], int]
    announce: Callable[[Sequence[str]], Sequence[Outgoing]]
