"""Statistics, workers, and streams of changes (server-sent events)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from tidemill import __version__
from tidemill.brokers.contract.features import Feature
from tidemill.brokers.contract.inspection import totals_of
from tidemill.core.clock import clock
from tidemill.core.job import Record
from tidemill.doctor.examine import problems
from tidemill.errors import JobNotFound, ResultTimeout
from tidemill.server.http.api.queues import queue_out
from tidemill.server.http.endpoints import Call, Endpoint, Stream
from tidemill.server.http.schemas.jobs import JobOut
from tidemill.server.http.schemas.queues import Totals
from tidemill.server.http.schemas.system import FindingOut, Health, Stats, WorkerOut, Workers
from tidemill.server.http.stats_stream import event

LOOK_EVERY = 1.0  # seconds between two looks at a watched job. Its end is reported at once.
KEEP_ALIVE = 15  # looks without news after which a stream sends a comment, to keep its connection


async def get_stats(call: Call) -> Stats:
    """Get statistics of the store and this server."""
    backend = call.backend
    broker = backend.mill.broker
    rows, owners = await backend.run(lambda: (backend.mill.queues(), broker.owners()))
    knows = Feature.INSPECT in broker.features
    return Stats(
        version=__version__,
        url=broker.url,
        started=backend.started,
        time=clock.wall(),
        workers=sum(1 for owner in owners if owner.kind == "worker") if knows else None,
        totals=Totals(**totals_of(rows, knows=knows)),
        queues=[queue_out(row) for row in rows],
    )


async def get_health(call: Call) -> Health:
    """List what is wrong with the store, its queues and its workers, the worst first.

    ``ok`` is false if a finding is ``fail``. The findings are those of ``tidemill doctor``.
    """
    found = await call.backend.run(problems, call.backend.mill)
    findings = msgspec.convert(found, list[FindingOut], from_attributes=True)
    return Health(not any(finding.status == "fail" for finding in found), findings)


async def list_workers(call: Call) -> Workers:
    """List the workers and other owners of jobs that are attached to the store."""
    broker = call.backend.mill.broker
    if Feature.INSPECT not in broker.features:  # the broker knows only the owners of this process
        return Workers(None)
    owners = await call.backend.run(broker.owners)
    return Workers(msgspec.convert(owners, list[WorkerOut], from_attributes=True))


async def watch_queues(call: Call) -> Stream:
    """Stream the statistics of all queues whenever they change, at most once a second.

    The events have the name ``queues``, and the same data as ``/v1/queues``.
    """
    return Stream(call.backend.snapshots.listen(), shared=True)


async def watch_job(call: Call, job_id: str) -> Stream:
    """Stream the state of a job whenever it changes, until it has ended.

    The events have the name ``job``; the last event has the name ``end``. Their data is a job as in
    ``/v1/jobs``.
    """
    job = call.backend.mill.job(job_id)
    record = await job.arefresh()
    return Stream(_changes(call, job_id, record))


async def _changes(call: Call, job_id: str, record: Record) -> AsyncIterator[bytes]:
    backend, sent, quiet = call.backend, b"", 0
    job = backend.mill.job(job_id)
    while True:
        data = msgspec.json.encode(JobOut(**call.shown(record).public()))
        name = "end" if record.state.finished else "job"
        quiet += 1
        if data != sent:
            yield event(name, data)
            sent, quiet = data, 0
        elif quiet % KEEP_ALIVE == 0:
            yield b": here\n\n"
        if record.state.finished or backend.stopping.is_set():
            return
        try:
            await backend.await_end(job, LOOK_EVERY)
        except ResultTimeout:
            pass
        except JobNotFound as error:  # an acknowledged message, or a deleted job
            yield event("end", msgspec.json.encode({"id": job_id, "detail": str(error)}))
            return
        record = job.record


ENDPOINTS = (
    Endpoint("GET", "/v1/stats", get_stats),
    Endpoint("GET", "/v1/health", get_health),
    Endpoint("GET", "/v1/workers", list_workers),
    Endpoint("GET", "/v1/events", watch_queues),
    Endpoint("GET", "/v1/jobs/{job_id}/events", watch_job, also=(410,)),
)
