"""The whole: numbers of everything, who works, and streams of what changes (server-sent events)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec

from tidemill import __version__
from tidemill.brokers.base import Feature, totals_of
from tidemill.errors import JobNotFound, ResultTimeout
from tidemill.job import Owner, Record
from tidemill.server.api.jobs import job_out
from tidemill.server.api.queues import queue_out
from tidemill.server.backend import Backend
from tidemill.server.endpoints import Call, Endpoint, Stream
from tidemill.server.shapes.whole import Stats, Totals, WorkerOut, Workers
from tidemill.server.snapshots import event

__all__ = ["ENDPOINTS"]

LOOK_EVERY = 1.0
"""Seconds between two looks at a job that somebody watches; of its end it is told at once."""

KEEP_ALIVE = 15
"""Looks after which a stream says that it is still there."""


async def get_stats(call: Call) -> Stats:
    """The store and this server in numbers."""
    backend = call.backend
    broker = backend.mill.broker
    rows, owners = await backend.run(lambda: (broker.stats(), broker.owners()))
    knows = Feature.INSPECT in broker.features
    return Stats(
        version=__version__,
        url=broker.url,
        started=backend.started,
        time=time.time(),
        workers=sum(1 for owner in owners if owner.kind == "worker") if knows else None,
        totals=Totals(**totals_of(rows, knows=knows)),
        queues=[queue_out(row) for row in rows],
    )


async def list_workers(call: Call) -> Workers:
    """Who is attached to the store now: workers, and others that hold jobs."""
    broker = call.backend.mill.broker
    if Feature.INSPECT not in broker.features:  # it knows no others than this server
        return Workers(None)
    owners = await call.backend.run(broker.owners)
    return Workers([_worker(owner) for owner in owners])


def _worker(owner: Owner) -> WorkerOut:
    return WorkerOut(
        id=owner.id,
        kind=owner.kind,
        name=owner.name,
        host=owner.host,
        pid=owner.pid,
        started=owner.started,
        queues=list(owner.queues),
        concurrency=owner.concurrency,
    )


async def watch_queues(call: Call) -> Stream:
    """The numbers of all queues, again whenever they change, at most once a second.

    Events are called ``queues``, their data is as that of ``/v1/queues``.
    """
    return Stream(call.backend.snapshots.listen(), shared=True)


async def watch_job(call: Call, job_id: str) -> Stream:
    """A job as it stands, again whenever it changes, until it has ended.

    Events are called ``job``, the last one ``end``; their data is as that of ``/v1/jobs``.
    """
    job = call.backend.mill.job(job_id)
    record = await job.arefresh()
    return Stream(_changes(call.backend, job_id, record))


async def _changes(backend: Backend, job_id: str, record: Record) -> AsyncIterator[bytes]:
    job, said, quiet = backend.mill.job(job_id), b"", 0
    while True:
        data = msgspec.json.encode(job_out(record))
        name = "end" if record.state.finished else "job"
        quiet += 1
        if data != said:
            yield event(name, data)
            said, quiet = data, 0
        elif quiet % KEEP_ALIVE == 0:
            yield b": here\n\n"
        if record.state.finished or backend.stopping.is_set():
            return
        try:
            await backend.await_state(job, LOOK_EVERY)
        except ResultTimeout:
            pass
        except JobNotFound as error:  # it was a message, and is acknowledged; or it was deleted
            yield event("end", msgspec.json.encode({"id": job_id, "detail": str(error)}))
            return
        record = job.record


ENDPOINTS = (
    Endpoint("GET", "/v1/stats", get_stats),
    Endpoint("GET", "/v1/workers", list_workers),
    Endpoint("GET", "/v1/events", watch_queues),
    Endpoint("GET", "/v1/jobs/{job_id}/events", watch_job, also=(410,)),
)
