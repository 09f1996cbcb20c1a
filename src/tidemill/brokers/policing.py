"""What operators set on a server that carries jobs, as far as it can destroy them."""

from __future__ import annotations

from typing import Protocol, cast

import msgspec

from tidemill.brokers.base import Broker

__all__ = ["Danger", "Policed", "Policing", "policing"]


class Danger(msgspec.Struct, frozen=True):
    """What can destroy accepted jobs, and what to do about it."""

    text: str
    advice: str


class Policed(msgspec.Struct, frozen=True):
    """The answer of a server.

    Attributes:
        seen: where the policies were read, or why they could not be.
        dangers: empty when nothing is known to be wrong.
        delays: what delayed jobs need on this server; empty when they need nothing.
    """

    seen: str
    dangers: list[Danger]
    delays: str = ""


class Policing(Protocol):
    """A broker whose server has policies."""

    def policies(self) -> Policed:
        """Which policies can destroy accepted jobs."""
        ...


def policing(broker: Broker) -> Policing | None:
    """The broker, if its server has policies."""
    return cast(Policing, broker) if hasattr(broker, "policies") else None
