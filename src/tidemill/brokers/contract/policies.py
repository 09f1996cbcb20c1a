"""The part of the contract that reports server policies which can destroy accepted jobs."""

from __future__ import annotations

from typing import Protocol, cast

import msgspec

from tidemill.brokers.contract.broker import Broker


class Danger(msgspec.Struct, frozen=True):
    """A policy that can destroy accepted jobs, and the advice against it."""

    text: str
    advice: str


class ServerPolicies(msgspec.Struct, frozen=True):
    """The policies of a server, as far as they concern jobs.

    Attributes:
        seen: the place where the policies were read, or the reason why they could not be read.
        dangers: the dangerous policies that were found.
    """

    seen: str
    dangers: list[Danger]


class HasPolicies(Protocol):
    """A broker whose server has policies."""

    def policies(self) -> ServerPolicies:
        """The policies that can destroy accepted jobs."""
        ...


def with_policies(broker: Broker) -> HasPolicies | None:
    """The broker with its policies; None when its server has no policies."""
    return cast(HasPolicies, broker) if hasattr(broker, "policies") else None
