"""Owners of leases as a broker knows them, and the commands to them."""

from __future__ import annotations

import msgspec

__all__ = ["RELAY", "Command", "Owner"]


class Command(msgspec.Struct, array_like=True, gc=False):
    """A command to an owner: ``cancel`` or ``terminate`` a lease, ``quiet``, ``stop``, ``dump``.

    ``lost`` says that the broker has given it up: its leases are others' now, and it gets no more
    before it attaches again.
    """

    verb: str
    token: int = 0


RELAY = "relay"
"""The kind of an owner that brings jobs to a carrier; it runs none of its jobs."""


class Owner(msgspec.Struct, kw_only=True):
    """A worker, a relay, or a consumer of messages, as the broker knows it.

    A remote owner (:mod:`tidemill.brokers.contract.remote_owners`) has a ``lease``: seconds of
    silence for
    which it is given up. Without one it lives as long as its process. ``serial`` is the highest it
    gave a step before it attached: steps up to that are over.
    """

    id: str
    kind: str = "worker"
    name: str = ""
    host: str = ""
    pid: int = 0
    started: float = 0.0
    queues: tuple[str, ...] = ()
    concurrency: int = 0
    board: str = ""
    lease: float = 0.0
    serial: int = 0
