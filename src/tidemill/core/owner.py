"""Owners of leases as a broker knows them, and the commands to them."""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, array_like=True, gc=False):
    """A command to an owner: ``cancel`` or ``terminate`` a lease, ``quiet``, ``stop``.

    ``outgrown WHY`` beside ``quiet`` tells a worker that the store or its job server has another
    version, and no longer serves this one.

    ``dump ID`` and ``profile ID SECONDS HERTZ`` ask a worker for a report. The worker writes the
    report into the history of the store (:mod:`tidemill.client.worker_reports`).

    ``lost`` tells the owner that the broker counts it as dead. Other owners may have its leases
    now. The owner gets no new lease before it attaches again.
    """

    verb: str
    token: int = 0


class Owner(msgspec.Struct, kw_only=True):
    """A worker or a consumer of messages, as the broker knows it.

    A remote owner (:mod:`tidemill.brokers.contract.remote_owners`) has a ``lease``. After this many
    seconds without a call, the broker counts the owner as dead. An owner without a ``lease`` lives
    as long as its process. ``serial`` is the number of the owner's last step before it attached
    again; the broker refuses older steps. ``version`` is the version of tidemill that a worker
    runs; it is empty for consumers. ``ahead`` is the seconds by which the clock of a
    worker's machine was ahead of the store's clock when the worker began.
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
    version: str = ""
    ahead: float = 0.0
