"""Reservations as requests and answers have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tidemill.server.shapes.terms import LONGEST_POLL, Name, OutEncoding, Seconds, Thousand


class ReserveIn(Struct, forbid_unknown_fields=True):
    """Take messages: all of the first queue before any of the second, or as ``order`` says."""

    queues: Annotated[list[Name], Meta(min_length=1, max_length=1000)]
    count: Thousand = 1
    timeout: Annotated[float, Meta(ge=0, le=LONGEST_POLL)] = 0.0
    order: Literal["strict", "fair", "merged"] = "strict"


class Reserved(Struct, kw_only=True):
    """A message taken. To be settled with its receipt, in ``ttr`` seconds."""

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
    """What was there; empty when nothing came in time."""

    jobs: list[Reserved]


class ReleaseIn(Struct, forbid_unknown_fields=True):
    """Back into the queue after ``delay`` seconds. With an ``error`` it counts as an attempt."""

    delay: Seconds = 0.0
    error: str | None = None


class TouchIn(Struct, forbid_unknown_fields=True):
    """The ttr begins anew, or with so many seconds."""

    ttr: Seconds | None = None


class BuryIn(Struct, forbid_unknown_fields=True):
    """Why it cannot be done."""

    reason: str = "buried"


class Receipts(Struct, forbid_unknown_fields=True):
    """Which reservations."""

    receipts: Annotated[list[str], Meta(max_length=10_000)]


class ReleaseMany(Receipts):
    """Which, and how: see ``ReleaseIn``."""

    delay: Seconds = 0.0
    error: str | None = None


class TouchMany(Receipts):
    """Which, and the ttr they begin anew with."""

    ttr: Seconds | None = None


class BuryMany(Receipts):
    """Which, and why they cannot be done."""

    reason: str = "buried"
