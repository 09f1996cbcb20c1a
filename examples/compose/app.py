"""A web app and its task, for ``compose.yaml``: put a job, look at it, wait for its result."""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tidemill import JobNotFound, ResultTimeout, Tidemill, this_job

mill = Tidemill()  # the store of $TIDEMILL_URL


@mill.task(timeout=60)
def report(name: str) -> str:
    """A job of two seconds, which tells how far it is."""
    for step in range(4):
        if job := this_job(None):
            job.progress(step, 4)
        time.sleep(0.5)
    return f"report {name} is ready"


async def put(request: Request) -> JSONResponse:
    """Put a job, and answer with its id."""
    job = await report.aenqueue(request.path_params["name"])
    return JSONResponse({"job": job.id}, status_code=202)


def look(request: Request) -> JSONResponse:
    """Answer with the state of a job, and with its result once there is one."""
    job = mill.job(request.path_params["id"])
    try:
        return JSONResponse({"state": "succeeded", "result": job.result(timeout=0)})
    except ResultTimeout:
        return JSONResponse({"state": str(job.state), "progress": job.progress})
    except JobNotFound as error:
        return JSONResponse({"error": str(error)}, status_code=404)


web = Starlette(
    routes=[
        Route("/reports/{name}", put, methods=["POST"]),
        Route("/jobs/{id}", look),
    ]
)
