"""Schedules: list, put, pause, resume, run now, delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.core.job import HIDDEN
from tidemill.errors import InvalidOption, ScheduleExists
from tidemill.schedules.declare import Schedule, matches
from tidemill.schedules.parse import OPTIONS
from tidemill.server.http.api.jobs import placed
from tidemill.server.http.endpoints import Call, Endpoint
from tidemill.server.http.schemas.jobs import Placed
from tidemill.server.http.schemas.system import ScheduleIn, ScheduleOut, Schedules
from tidemill.server.tokens import Role

_OF_JOBS = ("queue", "priority", "key", "retries", "timeout", "tags")


def _out(call: Call, schedule: Schedule) -> ScheduleOut:
    out = ScheduleOut(**schedule.public())
    if not call.sees_arguments:
        out.arguments = HIDDEN
    return out


async def list_schedules(call: Call) -> Schedules:
    """List all schedules, by name."""
    return Schedules([_out(call, row) for row in await call.backend.mill.schedules.alist()])


async def get_schedule(call: Call, name: str) -> ScheduleOut:
    """Get a schedule."""
    return _out(call, await call.backend.mill.schedules.aget(name))


async def put_schedule(call: Call, name: str, body: ScheduleIn) -> ScheduleOut:
    """Add a schedule.

    Adding the same schedule again does nothing. To replace a schedule, delete it first.
    """
    mill, when = call.backend.mill, _given(body, OPTIONS)
    try:
        made = mill.call(body.task, *body.args, **body.kwargs).using(**_given(body, _OF_JOBS))
    except TypeError as error:
        raise InvalidOption(str(error)) from None
    try:
        return _out(call, await mill.schedules.aadd(name, made, **when))
    except ScheduleExists:
        if not await call.backend.run(lambda: matches(mill.runtime, name, made, **when)):
            raise
        call.status = 200
        return _out(call, await mill.schedules.aget(name))


def _given(body: ScheduleIn, names: Sequence[str]) -> dict[str, Any]:
    values = ((name, getattr(body, name)) for name in names)
    given = {name: value for name, value in values if value is not None and value is not False}
    return given | {name: int(given[name]) for name in ("repeats", "retries") if name in given}


async def pause_schedule(call: Call, name: str) -> ScheduleOut:
    """Pause a schedule: it does not fire until it is resumed."""
    return _out(call, await call.backend.mill.schedules.apause(name))


async def resume_schedule(call: Call, name: str) -> ScheduleOut:
    """Resume a paused schedule from now on."""
    return _out(call, await call.backend.mill.schedules.aresume(name))


async def run_schedule(call: Call, name: str) -> Placed:
    """Put a job of a schedule now, in addition to its times."""
    return placed(call, await call.backend.mill.schedules.arun(name))


async def delete_schedule(call: Call, name: str) -> None:
    """Delete a schedule. The next worker whose code declares the schedule adds it again."""
    await call.backend.mill.schedules.aremove(name)


ADMIN = Role.ADMIN
ENDPOINTS = (
    Endpoint("GET", "/v1/schedules", list_schedules),
    Endpoint("GET", "/v1/schedules/{name}", get_schedule),
    Endpoint(
        "PUT",
        "/v1/schedules/{name}",
        put_schedule,
        ADMIN,
        status=201,
        also=(200, 409, 507),
        audit="added schedule",
    ),
    Endpoint("POST", "/v1/schedules/{name}/pause", pause_schedule, audit="paused schedule"),
    Endpoint("POST", "/v1/schedules/{name}/resume", resume_schedule, audit="resumed schedule"),
    Endpoint(
        "POST",
        "/v1/schedules/{name}/run",
        run_schedule,
        status=201,
        also=(200, 409, 507),
        audit="ran schedule",
    ),
    Endpoint("DELETE", "/v1/schedules/{name}", delete_schedule, ADMIN, audit="removed schedule"),
)
