"""The page and the task in one app. A worker runs the task: tidemill worker letters:mill."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from flask import Flask, Response, abort, current_app, request, send_file

from tidemill import Job, JobCancelled, JobContext, JobNotFound, Tidemill, this_job

app = Flask(__name__)
app.config["SENDER"] = "Ada"


def in_app_context(context: JobContext) -> Iterator[None]:
    """Run each task inside the context of the app, as a request runs."""
    with app.app_context():
        yield


mill = Tidemill(middleware=[in_app_context])


@mill.task(timeout=600)
def send(count: int) -> str:
    """Send so many letters, one after the other."""
    job = this_job(None)
    for number in range(count):
        if job and job.cancelled:
            raise JobCancelled(f"stopped after {number} letters")
        time.sleep(0.2)  # here you would send a letter
        if job:
            job.progress(number + 1, count)
    return f"{count} letters sent by {current_app.config['SENDER']}"


def view(job: Job[str]) -> dict[str, Any]:
    """A job as JSON for the page."""
    record = job.record
    done, total = record.progress or (0, 0)
    text = job.result() if record.state == "succeeded" else job.error
    return {"id": job.id, "state": record.state, "done": done, "total": total, "text": text}


@app.get("/")
def page() -> Response:
    return send_file(Path(__file__).with_name("page.html"))


@app.post("/jobs")
def start() -> tuple[dict[str, str], int]:
    count = request.args.get("count", 20, type=int)
    return {"id": send.enqueue(count).id}, 202


@app.get("/jobs")
def newest() -> list[dict[str, Any]]:
    return [view(job) for job in islice(mill.jobs(task=send), 10)]


@app.get("/jobs/<job_id>")
def show(job_id: str) -> dict[str, Any]:
    try:
        return view(mill.job(job_id))
    except JobNotFound:
        abort(404)


@app.post("/jobs/<job_id>/cancel")
def cancel(job_id: str) -> dict[str, bool]:
    return {"cancelling": mill.job(job_id).cancel()}
