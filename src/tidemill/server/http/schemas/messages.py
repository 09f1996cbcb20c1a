"""Schemas of reservations and topics in requests and answers."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from tidemill.server.http.schemas.jobs import PublishOptions
from tidemill.server.http.schemas.types import (
    FirstWait,
    MostReserved,
    Name,
    Order,
    OutEncoding,
    Seconds,
    says,
)


class ReserveIn(Struct, forbid_unknown_fields=True):
    """Reserve messages of these queues, in this ``order``."""

    queues: Annotated[list[Name], Meta(min_length=1, max_length=1000)]
    count: MostReserved = 1
    timeout: FirstWait = 0.0
    order: Order = "strict"


class Reserved(Struct, kw_only=True):
    """A reserved message. Settle it with its receipt within ``ttr`` seconds."""

    receipt: str
    id: str
    queue: str
    body: Any
    encoding: OutEncoding
    attempt: int
    ttr: float | None
    created: float
    priority: float
    key: str | None
    tags: list[str]
    headers: dict[str, str]


class ReservedMany(Struct):
    """The reserved messages; an empty list when no message came in time."""

    jobs: list[Reserved]


class ReleaseIn(Struct, forbid_unknown_fields=True):
    """Release after ``delay`` seconds. With an ``error`` the attempt counts."""

    delay: Seconds = 0.0
    error: str | None = None


class TouchIn(Struct, forbid_unknown_fields=True):
    """Start the ttr again. ``ttr`` sets a new ttr, in seconds."""

    ttr: Seconds | None = None


class BuryIn(Struct, forbid_unknown_fields=True):
    """The reason why the job cannot be done."""

    reason: str = "buried"


class Receipts(Struct, forbid_unknown_fields=True):
    """The receipts of reservations."""

    receipts: Annotated[list[str], Meta(max_length=10_000)]


class ReleaseMany(Receipts):
    """The receipts of reservations, and how to release them: see ``ReleaseIn``."""

    delay: Seconds = 0.0
    error: str | None = None


class TouchMany(Receipts):
    """The receipts of reservations, and their new ttr, if it changes."""

    ttr: Seconds | None = None


class BuryMany(Receipts):
    """The receipts of reservations, and the reason why these jobs cannot be done."""

    reason: str = "buried"


class PublishQuery(PublishOptions):
    """The options of a publish; all copies have them. ``mandatory``: 404 if no queue is bound."""

    mandatory: Annotated[
        bool, says("refuse the message with 404 when no queue is bound to the topic")
    ] = False


class BindingsOut(Struct):
    """The patterns that a queue is bound to, in order."""

    bindings: list[str]
