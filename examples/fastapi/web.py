"""The page: it starts jobs, shows them and cancels them. It never runs a task itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import FileResponse
from photos import mill, resize

from tidemill import Job, JobNotFound


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with mill:  # closes the store when the server stops
        yield


app = FastAPI(lifespan=lifespan)


def view(job: Job[str]) -> dict[str, Any]:
    """A job as JSON for the page."""
    record = job.record
    done, total = record.progress or (0, 0)
    text = job.result() if record.state == "succeeded" else job.error
    return {"id": job.id, "state": record.state, "done": done, "total": total, "text": text}


@app.get("/")
def page() -> FileResponse:
    return FileResponse(Path(__file__).with_name("page.html"))


@app.post("/jobs", status_code=202)
async def start(count: Annotated[int, Query(gt=0, le=1000)] = 20) -> dict[str, str]:
    job = await resize.aenqueue(count)
    return {"id": job.id}


@app.get("/jobs")
def newest() -> list[dict[str, Any]]:
    return [view(job) for job in islice(mill.jobs(task=resize), 10)]


@app.get("/jobs/{job_id}")
def show(job_id: str) -> dict[str, Any]:
    try:
        return view(mill.job(job_id))
    except JobNotFound:
        raise HTTPException(404, "no such job") from None


@app.post("/jobs/{job_id}/cancel")
async def cancel(job_id: str) -> dict[str, bool]:
    return {"cancelling": await mill.job(job_id).acancel()}
