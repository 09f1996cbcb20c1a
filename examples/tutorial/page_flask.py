from pathlib import Path
from typing import Any

from flask import Flask, Response, abort, send_file
from tasks import mill, resize

from tidemill import JobNotFound

app = Flask(__name__)


@app.get("/")
def page() -> Response:
    return send_file(Path(__file__).with_name("page.html"))


@app.post("/jobs")
def start() -> dict[str, str]:
    return {"id": resize.enqueue(20).id}


@app.get("/jobs/<job_id>")
def show(job_id: str) -> dict[str, Any]:
    try:
        job = mill.job(job_id).refresh()
    except JobNotFound:
        abort(404)
    return {"state": job.state, "progress": job.progress}


@app.post("/jobs/<job_id>/cancel")
def cancel(job_id: str) -> dict[str, bool]:
    return {"cancelling": mill.job(job_id).cancel()}
