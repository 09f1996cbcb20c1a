from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse
from tasks import mill, resize

from tidemill import JobNotFound

app = FastAPI()


@app.get("/")
def page() -> FileResponse:
    return FileResponse(Path(__file__).with_name("page.html"))


@app.post("/jobs")
def start() -> dict[str, str]:
    return {"id": resize.enqueue(20).id}


@app.get("/jobs/{job_id}")
def show(job_id: str) -> dict[str, Any]:
    try:
        job = mill.job(job_id).refresh()
    except JobNotFound:
        raise HTTPException(404, "no such job") from None
    return {"state": job.state, "progress": job.progress}


@app.post("/jobs/{job_id}/cancel")
def cancel(job_id: str) -> dict[str, bool]:
    return {"cancelling": mill.job(job_id).cancel()}
